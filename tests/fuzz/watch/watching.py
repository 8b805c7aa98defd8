"""The duty of a watch on any model: change no bit, and show the model's own weights or name the calls not seen."""

from collections import defaultdict
from collections.abc import Callable

import torch
from hypothesis import note
from torch import Tensor, nn

import regard
from regard.errors import RegardError
from regard.watching.report import Report
from regard.watching.watch import Seen
from tests.fuzz.watch.truths import Truth, Truths

TOLERANCE = 2e-5
Run = Callable[[], list[Tensor]]


def require_same_bits(model: nn.Module, truths: Truths, run: Run, *, verify: bool = False, copy: bool = False) -> Seen:
    """Run it unwatched, watched and unwatched again: the same bits, and the same random state. Gives what was seen."""
    found = []
    seen = None
    for watched in (False, True, False):
        torch.manual_seed(11)
        truths.calls.clear()
        if watched:
            with regard.watch(model, verify=verify, copy=copy) as seen:
                outputs = run()
            calls = list(truths.calls)
        else:
            outputs = run()
        found.append((outputs, torch.get_rng_state()))
    before, during, after = found
    assert seen is not None
    for name, other in (("while it is watched", during), ("after it was watched", after)):
        for mine, theirs in zip(before[0], other[0], strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), f"the model gives other bits {name}"
        assert torch.equal(before[1], other[1]), f"the model leaves another random state {name}"
    truths.calls[:] = calls
    return seen


def require_truth(model: nn.Module, seen: Seen, truths: Truths) -> None:
    report = seen.report()
    words = str(report)
    paths = {id(module): path for path, module in model.named_modules()}
    by_path: dict[str, list[Truth]] = defaultdict(list)
    for truth in truths.calls:
        by_path[paths[id(truth.module)]].append(truth)
    decoys = {paths[id(module)] for module in truths.decoys}
    shown: dict[str, list[regard.AttentionMap]] = defaultdict(list)
    for call in seen.calls:
        if call.map is not None:
            shown[_owner(call.name, by_path, decoys)].append(call.map)
    for path, maps in shown.items():
        if path in decoys:
            assert _is_named(path, report), f"{path}: a softmax that is no attention is shown as attention\n{words}"
            continue
        assert path in by_path, f"{path}: {len(maps)} maps of a module that does not attend\n{words}"
        _match(path, maps, by_path[path], words)
    for path, calls in by_path.items():
        missing = len(calls) - len(shown[path])  # below 0 where heads are shown one by one
        if missing > 0:
            assert _is_named(path, report), (
                f"{path}: {missing} of {len(calls)} calls ({calls[0].writing}) are missing, without a note\n{words}"
            )


def _owner(name: str, truths: dict[str, list[Truth]], decoys: set[str]) -> str:
    """The attending module that a call belongs to: its own, or the nearest around it or inside it."""
    around = [p for p in (*truths, *decoys) if p == name or name.startswith(f"{p}.")]
    inside = [p for p in (*truths, *decoys) if p.startswith(f"{name}.")]
    return max(around, key=len) if around else inside[0] if inside else name


def _is_named(path: str, report: Report) -> bool:
    # Of one query and one key it cannot be told what the axes are.
    missed = [said for said, _ in (*report.missed, *report.others)]
    parent = path.rpartition(".")[0]
    notes = [n for c in report.calls if c.name == path for n in c.notes]
    return bool(notes) or any(
        said.split(",")[0] in (path, parent) or said.split(",")[0].startswith(f"{path}.") for said in missed
    )


def _match(path: str, maps: list[regard.AttentionMap], calls: list[Truth], words: str) -> None:
    left = list(calls)
    for number, found in enumerate(maps):
        dense = found.dense().detach().double()
        if dense.dim() == 2 and any(_is_one_head(dense, right) for truth in calls for right in truth.right()):
            continue  # heads that were multiplied one by one are shown so
        for at, truth in enumerate(left):
            if any(_agrees(dense, right) for right in truth.right()):
                left = left[at + 1 :]
                break
        else:
            closest = min((_distance(dense, r) for t in calls for r in t.right()), default=None)
            raise AssertionError(
                f"{path}: map {number} {tuple(found.shape)} is none of the weights of {calls[0].writing} "
                f"{tuple(calls[0].right()[0].shape)}; the nearest is {closest} away\n{words}"
            )


def _is_one_head(dense: Tensor, right: Tensor) -> bool:
    return any(_agrees(dense, head) for head in right.flatten(0, -3))


def _agrees(dense: Tensor, right: Tensor) -> bool:
    return _distance(dense, right) <= TOLERANCE * max(1.0, float(right.abs().max()))


def _distance(dense: Tensor, right: Tensor) -> float:
    """The largest difference. Heads may be folded into the batch, and dimensions of one head or sequence left out."""
    if dense.shape[-2:] != right.shape[-2:] or dense.numel() != right.numel():
        return float("inf")
    if dense.dim() == 4 and dense.shape != right.shape and right.shape[1] > 1:
        return float("inf")
    apart = (dense.reshape(right.shape) - right).abs()[~(dense.reshape(right.shape).isnan() & right.isnan())]
    return float(apart.max()) if apart.numel() else 0.0


def require_joined(model: nn.Module, seen: Seen, truths: Truths) -> None:
    """`joined` of a module that ran several times: the steps at their own positions, or a refusal with a reason."""
    paths = {id(module): path for path, module in model.named_modules()}
    by_path: dict[str, list[Truth]] = defaultdict(list)
    for truth in truths.calls:
        by_path[paths[id(truth.module)]].append(truth)
    for path, calls in by_path.items():
        try:
            joined = seen.joined(path)
        except RegardError as error:
            note(f"{path}: joined refuses: {error}")
            continue
        _require_rows(path, joined.dense().detach().double(), calls)


def _require_rows(path: str, dense: Tensor, calls: list[Truth]) -> None:
    queries = max(c.first + c.right()[0].shape[-2] for c in calls)
    keys = max(c.first_key + c.right()[0].shape[-1] for c in calls)
    shape = calls[0].right()[0].shape
    right = torch.zeros(*shape[:-2], queries, keys, dtype=torch.float64)
    places: set[int] = set()
    for call in calls:
        weights = call.right()[-1]
        rows = range(call.first, call.first + weights.shape[-2])
        assert not places & set(rows), f"{path}: joined says that calls are steps which have the same positions"
        places |= set(rows)
        right[..., rows.start : rows.stop, call.first_key : call.first_key + weights.shape[-1]] = weights
    assert tuple(dense.shape[-2:]) == (queries, keys), (
        f"{path}: joined is {tuple(dense.shape)}, where there are {queries} queries and {keys} keys"
    )
    assert _agrees(dense, right), f"{path}: joined is {_distance(dense, right)} off"
