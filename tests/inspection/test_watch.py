"""Watching plain modules: maps and their names, the unchanged model, and the report of the rest."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import regard
from regard.errors import ArgumentError, NotSeenError, OverwrittenError
from regard.kernels.base import row_sum_error as real_row_sum_error
from regard.maps.sources import factors as factors_module
from regard.watching import head_table, rollout
from regard.watching.hooks.observers import FUNCTIONS, this_thread
from regard.watching.readers import kernel_lse as lse_module
from regard.watching.watch import Seen
from tests import each_once
from tests.fuzz.watch.truths import kernel_weights
from tests.modules import module, parts, same_bits, watching

B, H, T, D = 2, 3, 7, 5
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Attend(nn.Module):
    def __init__(self, heads: int = H, kv_heads: int = H, width: int = D) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        self.project = nn.Linear(heads * width, (heads + 2 * kv_heads) * width)

    def vectors(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.heads, self.kv_heads, self.kv_heads)
        parts = self.project(x).split([n * self.width for n in heads], -1)
        q, k, v = (p.unflatten(-1, (n, -1)).transpose(-2, -3) for p, n in zip(parts, heads, strict=True))
        return q, k, v

    def forward(self, x: Tensor, **settings: Any) -> Tensor:
        q, k, v = self.vectors(x)
        return F.scaled_dot_product_attention(q, k, v, **settings).transpose(-2, -3).flatten(-2)


@parts(lambda **settings: {"first": Attend(**settings), "second": Attend(**settings)})
def Two(self: Any, x: Tensor, **settings: Any) -> Tensor:
    return self.second(self.first(x, **settings), **settings)


def x() -> Tensor:
    return 2 * torch.randn(B, T, H * D)


def dense(model: Any, x: Tensor, mask: Tensor | None = None, **settings: Any) -> Tensor:
    q, k, _ = (one.double() for one in model.vectors(x))
    return kernel_weights(q, k, mask, **settings)


def close(found: Any, expected: Tensor, tolerance: float = 2e-6) -> None:
    found = found.dense() if isinstance(found, regard.AttentionMap) else found
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=tolerance)


def watched(model: nn.Module, *inputs: Tensor, **settings: Any) -> Seen:
    seen = same_bits(model, *inputs, **settings)
    assert not seen.report().missed, str(seen.report())
    return seen


LENGTHS = torch.tensor([7, 4])
KEEP = torch.arange(T) < LENGTHS[:, None]
TRIL = torch.ones(T, T, dtype=torch.bool).tril()
MIN = torch.finfo(torch.float32).min
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal flag": {"is_causal": True},
    "bool, T x S": {"attn_mask": TRIL},
    "padding": {"attn_mask": KEEP[:, None, None]},
    "causal and padding": {"attn_mask": TRIL & KEEP[:, None, None]},
    "left padding": {"attn_mask": TRIL & KEEP.flip(-1)[:, None, None]},
    "window": {"attn_mask": TRIL & ~TRIL.tril(-3)},
    "window both ways": {"attn_mask": ~(TRIL.tril(-3) | TRIL.tril(-3).T)},
    "random": {"attn_mask": torch.rand(T, T, generator=torch.Generator().manual_seed(0)) > 0.4},
    "by head": {"attn_mask": torch.rand(1, H, T, T, generator=torch.Generator().manual_seed(0)) > 0.4},
    "added": {"attn_mask": torch.randn(1, H, T, T, generator=torch.Generator().manual_seed(0))},
    "added, per key": {"attn_mask": torch.randn(B, 1, 1, T, generator=torch.Generator().manual_seed(0))},
    "-inf": {"attn_mask": torch.zeros(T, T).masked_fill(~TRIL, -torch.inf)},
    "finfo.min": {"attn_mask": torch.zeros(B, 1, T, T).masked_fill(~(TRIL & KEEP[:, None, None]), MIN)},
    "rows of -inf": {"attn_mask": torch.zeros(T, T).masked_fill(~TRIL.tril(-2), -torch.inf)},
    "rows of False": {"attn_mask": TRIL.tril(-2)},
    "scale": {"scale": 0.7},
}
RECOGNISED = {"none", "causal flag", "bool, T x S", "padding", "causal and padding", "left padding", "window",
              "window both ways", "added, per key", "-inf", "finfo.min", "scale",
              "rows of -inf", "rows of False"}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "context"), each_once(MASKS, [torch.no_grad, torch.enable_grad, torch.inference_mode])
)
def test_every_mask_in_every_context(name: str, context: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's own log-sum-exp is read: no row state is computed by a pass over the scores.
    monkeypatch.setattr("regard.maps.sources.factors.row_state", lambda call: 1 / 0)
    model, inputs, settings = Two(), x(), MASKS[name]
    seen = watched(model, inputs, context=context, **settings)
    assert list(seen) == [("first", 0), ("second", 0)]
    with torch.no_grad():
        expected = dense(model.first, inputs, **{name.removeprefix("attn_"): one for name, one in settings.items()})
    close(seen["first"].dense(), expected)
    assert all(call.error < 1e-6 for call in seen.calls)
    assert bool(seen.record.policy.dense_masks) == (name not in RECOGNISED)
    assert len(seen.record.policy.dense_masks) <= 1
    live = (expected.sum(-1) > 0).sum()
    source: Any = seen["first"].source
    assert ((source.state > -torch.inf).sum() == live).all()
    close(seen["first"].received().sum(), live.double(), 1e-4)


def test_a_row_of_finfo_min_is_even_as_the_model_computed_it() -> None:
    mask = torch.zeros(B, 1, T, T)
    mask[1, :, 2:4] = MIN
    model, inputs = Attend(), x()
    seen = watched(model, inputs, attn_mask=mask)
    close(seen[""][1, :, 2:4], torch.full((H, 2, T), 1 / T))
    close(seen[""][0].dense(), dense(model, inputs)[0].detach())
    close(seen[""].entropy()[1, :, 3], torch.full((H,), T).log())


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="torch 2.14 refuses a mask beside is_causal=True")
def test_the_lowest_number_under_the_causal_flag_hides_a_key_only_beside_others() -> None:
    """Of a query that sees low keys alone the kernel makes an even row, whatever stands after it."""
    mask = torch.zeros(T, T).masked_fill(torch.arange(T) < 3, MIN)
    model, inputs = Attend(), x()
    seen = watched(model, inputs, attn_mask=mask, is_causal=True)
    with torch.no_grad():
        expected = dense(model, inputs, mask.masked_fill(~TRIL, -torch.inf))
    close(seen[""], expected)
    close(seen[""].dense()[0, 0, 2, :4], torch.tensor([1 / 3, 1 / 3, 1 / 3, 0]))
    assert seen.calls[0].error < 1e-6


@pytest.mark.parametrize("low", [-1e8, -1e9, MIN])
def test_low_numbers_say_who_may_attend(low: float) -> None:
    seen = watched(Attend(), x(), attn_mask=torch.zeros(T, T).masked_fill(~torch.ones(T, T).tril().bool(), low))
    source: Any = seen[""].source
    call = source.call
    assert call.bias is None
    assert "causal" in str(call.mask)


def test_a_row_of_several_low_numbers_is_even_over_the_largest() -> None:
    mask = torch.zeros(T, T)
    mask[2] = torch.tensor([-1e9, MIN, -1e9, MIN, MIN, MIN, MIN])
    seen = watched(Attend(), x(), attn_mask=mask)
    close(seen[""][0, 0, 2], torch.tensor([0.5, 0, 0.5, 0, 0, 0, 0]))


Raw = module(lambda m, q, k, v, **settings: F.scaled_dot_product_attention(q, k, v, **settings))


def test_masks_that_are_parts_of_one_tensor_are_told_apart() -> None:
    q, masks = torch.randn(1, H, 5, 4), (torch.rand(3, 5, 5) < 0.6) | torch.eye(5, dtype=torch.bool)
    with torch.no_grad(), regard.watch(model := Raw()) as seen:
        for mask in masks:
            model(q, q, q, attn_mask=mask)
    for found, mask in zip(seen.maps, masks, strict=True):
        close(found, (q @ q.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, T, D, dtype=dtype) for _ in range(3))
    seen = watched(Raw(), q, k, v, is_causal=True)
    scores = (q.double() @ k.double().mT * D**-0.5).masked_fill(~TRIL, -torch.inf)
    close(seen[""].dense(), scores.softmax(-1), 1e-12 if dtype == torch.float64 else 2e-6)
    assert seen.calls[0].error < (1e-12 if dtype == torch.float64 else 1e-2)


def test_order_and_number_of_calls() -> None:
    model = nn.Sequential(Attend(), Attend())
    with torch.no_grad(), regard.watch(model) as seen:
        model(x())
        model(x()[:, :4])
    assert list(seen) == [("0", 0), ("1", 0), ("0", 1), ("1", 1)] == seen.keys()
    assert [m.shape[-1] for m in seen.maps] == [7, 7, 4, 4]
    assert [m.shape[-1] for m in seen.calls_of("1")] == [7, 4]
    assert seen["1", 1] is seen.maps[3] is seen["1", -1]
    assert len(seen) == 4
    assert "1" in seen
    assert ("1", 1) in seen
    assert ("1", 2) not in seen
    assert seen.items()[2] == (("0", 1), seen.maps[2])


def test_a_module_in_two_places_has_its_first_name() -> None:
    shared = Attend()
    model = nn.Sequential(shared, shared)
    seen = watching(model)(x())
    assert list(seen) == [("0", 0), ("0", 1)]


Methods = module(lambda m, x: m.hidden[0](m.part.forward(x)), lambda: {"part": Attend(), "hidden": [Attend()]})
"""Calls a method of its part, and a part that is in no list of modules."""


def test_methods_and_unregistered_parts() -> None:
    model = Methods()
    seen = watching(model)(x())
    assert list(seen) == [("part", 0), ("", 0)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ["a.0", "a.1", "b.0"]),
        ("a", ["a.0", "a.1"]),
        ("a.1", ["a.1"]),
        ("*.0", ["a.0", "b.0"]),
        (["a.0", "b"], ["a.0", "b.0"]),
        (lambda path: path.endswith("1"), ["a.1"]),
        ("", ["a.0", "a.1", "b.0"]),
    ],
)
def test_names(names: Any, expected: list[str]) -> None:
    model = nn.ModuleDict({"a": nn.Sequential(Attend(), Attend()), "b": nn.Sequential(Attend())})
    model.forward = lambda x: model["b"](model["a"](x))
    seen = watching(model, names)(x())
    assert [name for name, _ in seen] == expected
    skipped = 3 - len(expected)
    assert ("not asked for" in str(seen.report())) == bool(skipped)


@pytest.mark.parametrize("key", [0, None, ("first",), ("first", "0"), ("first", 0.0), ("first", True), (0, "first")])
def test_what_is_no_key_is_refused(key: Any) -> None:
    seen = watching(Two())(x())
    with pytest.raises(ArgumentError, match=r"takes the path of a module, or \(path, number"):
        seen[key]


def test_unknown_names_are_refused_at_the_door() -> None:
    no_names: list[Any] = [3, [3]]
    no_module: Any = lambda x: x  # noqa: E731
    with pytest.raises(ArgumentError, match="no module of the model is named 'frist'; similar: first"):
        regard.watch(Two(), "frist")
    for wrong in no_names:
        with pytest.raises(ArgumentError, match=r"names must be .*a list of names or a function; got"):
            regard.watch(Two(), wrong)
    with pytest.raises(ArgumentError, match=r"takes a torch\.nn\.Module, got function"):
        regard.watch(no_module)


def test_a_module_called_several_times_has_a_list_by_name() -> None:
    model = Two()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x()), model(x())
    with pytest.raises(ArgumentError, match=r"maps of 2 calls: seen\.calls_of\('first'\) is their list, and seen"):
        seen["first"]
    with pytest.raises(ArgumentError, match="maps of 2 calls"):
        seen.softmax("first")
    assert seen.calls_of("first") == [seen["first", 0], seen["first", 1]]
    with pytest.raises(NotSeenError, match="no attention of 'secnd'"):
        seen.calls_of("secnd")


def test_what_was_not_seen_is_said() -> None:
    model = Two()
    seen = watching(model, "first")(x())
    with pytest.raises(NotSeenError, match=r"no attention of 'secnd' was seen; similar: first|no attention of 'secnd'"):
        seen["secnd"]
    with pytest.raises(KeyError, match="was called 1 times, numbered from 0; there is no call 3"):
        seen["first", 3]
    with regard.watch(nn.Linear(2, 2)) as empty:
        pass
    assert "no attention was observed" in str(empty.report())
    assert repr(seen) == "Seen(Two: 1 map of 1 module)"


def test_calls_outside_the_model_are_counted() -> None:
    model, other = Two(), Two()
    with torch.no_grad(), regard.watch(model) as seen:
        other(x())
        model(x())
    assert len(seen) == 2
    assert "2 calls outside the model" in str(seen.report())


class Cached(nn.Module):
    def __init__(self, *, fresh: bool) -> None:
        super().__init__()
        self.fresh = fresh
        self.register_buffer("keys", torch.zeros(B, H, T, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fresh:
            self.keys = torch.zeros(B, H, T, D) + k
        else:
            self.keys[:] = k
        return F.scaled_dot_product_attention(q, self.keys, v)


def test_a_static_cache_is_copied() -> None:
    model = Cached(fresh=False)
    first, second = ([torch.randn(B, H, T, D) for _ in range(3)] for _ in range(2))
    with torch.no_grad(), regard.watch(model) as seen:
        model(*first)
        model(*second)
    for weights, (q, k, _) in zip(seen.maps, (first, second), strict=True):
        close(weights.dense(), (q.double() @ k.double().mT * D**-0.5).softmax(-1))


@pytest.mark.parametrize("copy", [False, True])
def test_what_the_model_overwrites_later_is_noticed(copy: bool) -> None:
    model = Cached(fresh=True)
    q, k, v = (torch.randn(B, H, T, D) for _ in range(3))
    with torch.no_grad(), regard.watch(model, copy=copy) as seen:
        model(q, k, v)
        model.keys.zero_()
    if copy:
        close(seen[""].dense(), (q.double() @ k.double().mT * D**-0.5).softmax(-1))
        return
    for read in (lambda m: m.dense(), lambda m: m[0], lambda m: m.top_keys(2), lambda m: m @ v, lambda m: m.entropy()):
        with pytest.raises(OverwrittenError, match=r"the keys of .* written to .*copy=True"):
            read(seen[""])


def test_overwritten_masks_are_noticed() -> None:
    model, mask = Attend(), torch.randn(T, T)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x(), attn_mask=mask)
        mask.zero_()
        model(x(), attn_mask=mask)
    with pytest.raises(OverwrittenError, match="the masks"):
        seen["", 0].dense()
    seen["", 1].dense()


def test_views_of_much_more_are_copied() -> None:
    model = Attend()
    seen = watching(model)(x())
    # Query, key and value are views of one tensor: keeping two of them would keep the third.
    held = B * T * H * D * 4
    assert seen.report().held_bytes == 2 * held + B * T * H * 4
    source: Any = seen[""].source
    assert source.call.query.untyped_storage().nbytes() == held


def test_nothing_of_the_model_is_kept_after_the_watch_is_gone() -> None:
    model = Attend()
    with torch.no_grad(), regard.watch(model) as seen:
        output = model(x())
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
    model_alive = weakref.ref(model)
    del model, seen
    gc.collect()
    assert model_alive() is None


@pytest.mark.parametrize(
    "wrong", [lambda lse: lse + 0.01, lambda lse: lse.mT.contiguous().view_as(lse), torch.zeros_like]
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_wrong_lse_is_found_and_computed_anew(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], verify: bool
) -> None:
    monkeypatch.setitem(lse_module.KERNELS, KERNEL, lambda lse, queries: wrong(lse))
    model, inputs = Attend(), x()
    seen = watching(model, verify=verify)(inputs)
    if verify:
        assert seen.calls[0].error < 1e-6
    else:
        assert "a row sums to 1" in str(seen.report())
    close(seen[""].dense(), dense(model, inputs).detach())
    assert str(seen.report()).count("a row sums to 1") == 1


def test_the_check_is_made_once_and_not_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    right = real_row_sum_error
    monkeypatch.setattr(factors_module, "row_sum_error", lambda *args: checks.append(args) or right(*args))
    seen = watching(Two())(x())
    assert (repr(seen), len(checks)) == ("Seen(Two: 2 maps of 2 modules)", 0)
    for _ in range(2):
        seen["first"].entropy()
    assert len(checks) == 1
    seen.report()
    assert len(checks) == 2


@pytest.mark.parametrize("wrong", [None, lambda lse: lse + 0.01, lambda lse: lse - 0.01, torch.zeros_like])
def test_the_loop_takes_no_wrong_lse(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any] | None) -> None:
    pytest.importorskip("numba", reason="the loop comes with the extra 'fast'")
    from regard.maps.loop import one_loop

    checks = []
    right = real_row_sum_error
    monkeypatch.setattr(factors_module, "row_sum_error", lambda *args: checks.append(args) or right(*args))
    monkeypatch.setattr(one_loop, "SMALL", 0)
    if wrong is not None:
        monkeypatch.setitem(lse_module.KERNELS, KERNEL, lambda lse, queries: wrong(lse))
    model, inputs = Attend(), x()
    seen = watching(model)(inputs)
    with torch.no_grad():
        found = seen[""].summary("received", "entropy", "top_keys", k=2)
    exact = dense(model, inputs).detach()
    close(found["received"], exact.sum(-2), 64 * torch.finfo(torch.float32).eps)  # a sum over seven rows
    close(found["top_keys"].values, exact.topk(2).values)
    assert ("a row sums to 1" in str(seen.report())) is (wrong is not None)
    assert len(checks) == 1, "a map is checked once"


def test_last_queries_with_no_key_are_no_wrong_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="the loop comes with the extra 'fast'")
    from regard.maps.loop import one_loop

    monkeypatch.setattr(one_loop, "SMALL", 0)
    q = torch.randn(1, 2, 6, 8)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    allowed[-1] = False

    Masked = module(lambda m, q: nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=allowed))

    seen = watching(Masked())(q)
    with torch.no_grad():
        found = seen[""].summary("received", "top_keys", k=2)
    assert (found["top_keys"].values[..., -1, :] == 0).all()
    assert "a row sums to 1" not in str(seen.report())


def test_verify_finds_wrong_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors_module, "TOLERANCE", {torch.float32: 1e9})
    monkeypatch.setitem(lse_module.KERNELS, KERNEL, lambda lse, queries: lse - 0.5)
    seen = watching(Attend(), verify=True)(x())
    assert seen.calls[0].error > 0.05


def test_plain_modules_run_as_if_there_were_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    @parts(lambda: {"hooked": nn.Linear(4, 4), "plain": nn.Linear(4, 4), "attend": Attend()})
    def Model(self: Any, x: Tensor) -> Tensor:
        F.linear(self.plain(torch.ones(1, 4)), torch.ones(4, 4))
        return self.attend(self.hooked(torch.ones(1, 4)).sum() * x)

    def count(thread: Any, func: Any, args: Any, kwargs: Any) -> Any:
        calls.append(func)
        return func(*args, **kwargs)

    calls: list[Any] = []
    model = Model()
    monkeypatch.setitem(FUNCTIONS, F.linear, count)
    q = torch.randn(1, 1, 3, 4)
    model.hooked.register_forward_pre_hook(lambda *_: [F.scaled_dot_product_attention(q, q, q)].clear())
    seen = watching(model)(x())
    # The call in the open, that of the module with a hook, and none of the plain module's and of the projection's.
    assert len(calls) == 2
    assert [m.shape[-1] for m in seen.maps] == [3, T]


def traces() -> tuple[int, ...]:
    module = nn.modules.module
    return (
        len(module._global_forward_hooks), len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks_always_called) + len(module._global_forward_hooks_with_kwargs),
        torch._C._len_torch_function_stack(),
        torch.utils._python_dispatch._get_current_dispatch_mode_stack().__len__(), len(this_thread().watches),
        len(this_thread().stack),
    )  # fmt: skip


@parts(lambda error: {"error": error})
def Raises(self: Any, x: Tensor) -> Tensor:
    raise self.error("in the middle")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_the_middle(error: type[BaseException]) -> None:
    before = traces()
    model = nn.Sequential(Attend(), nn.Sequential(Raises(error)), Attend())
    with pytest.raises(error, match="in the middle"), torch.no_grad(), regard.watch(model) as seen:
        model(x())
    assert traces() == before == (0,) * 7
    assert list(seen) == [("0", 0)]
    again = watched(Two(), x())
    assert list(again) == [("first", 0), ("second", 0)]


def test_an_exception_that_the_model_catches() -> None:
    @parts(lambda: {"bad": nn.Sequential(Attend(), Raises(ValueError)), "good": Attend()})
    def Tries(self: Any, x: Tensor) -> Any:
        try:
            self.bad(x)
        except ValueError:
            return self.good(x)

    model = Tries()
    with torch.no_grad(), regard.watch(model) as seen:
        model(x())
        assert len(this_thread().stack) == 0
    assert list(seen) == [("bad.0", 0), ("good", 0)]


def test_an_observer_that_fails_does_not_disturb_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard.watching.readers.sdpa_calls.Sdpa, "read", lambda *_: 1 / 0)
    model, inputs = Two(), x()
    with torch.no_grad():
        expected = model(inputs)
        with regard.watch(model) as seen:
            assert torch.equal(model(inputs), expected)
    assert len(seen) == 0
    assert seen.report().missed[0] == ("first, call 0", "ZeroDivisionError: division by zero")
    with pytest.raises(NotSeenError, match="could not be read: ZeroDivisionError"):
        seen["first"]


def test_nested_watches() -> None:
    model, inputs = Two(), x()
    with torch.no_grad():
        expected = model(inputs)
        with regard.watch(model) as outer:
            with regard.watch(model.first, verify=True) as inner:
                assert torch.equal(model(inputs), expected)
            another = watching(model, "second")(inputs)
        model(inputs)
    assert list(outer) == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    assert list(inner) == [("", 0)]
    assert list(another) == [("second", 0)]
    assert traces() == (0,) * 7


def test_watches_that_do_not_end_in_the_order_they_began() -> None:
    one, other = regard.watch(model := Two()), regard.watch(model)
    with torch.no_grad(), torch.device("cpu"):
        one.__enter__()
        other.__enter__()
        model(x())
        one.__exit__(None, None, None)
        model(x())
        other.__exit__(None, None, None)
    assert (len(one), len(other)) == (2, 4)
    assert traces() == (0,) * 7


def in_a_thread(work: Callable[..., Any], *given: Any) -> None:
    thread = threading.Thread(target=work, args=given)
    thread.start()
    thread.join()


def test_threads() -> None:
    model, inputs = Two(), x()
    results: dict[Any, Any] = {}

    def work(attach: bool) -> None:
        with torch.no_grad():
            if attach:
                with seen.attach():
                    results[attach] = model(inputs)
                    results["stack"] = len(this_thread().watches)
                results["after"] = traces()[3:]
            else:
                results[attach] = model(inputs)

    with torch.no_grad(), regard.watch(model) as seen:
        for attach in (False, True):
            in_a_thread(work, attach)
        assert list(seen) == [("first", 0), ("second", 0)]
        model(inputs)
    assert len(seen) == 4
    assert torch.equal(results[True], results[False])
    assert results["after"] == (0,) * 4
    assert traces() == (0,) * 7
    with pytest.raises(ArgumentError, match="another thread"), regard.watch(model) as again, again.attach():
        pass


def test_a_layer_in_a_thread_without_the_watch_is_no_part_of_the_whole() -> None:
    @parts(lambda: {"inner": Attends(), "feed": nn.Sequential(nn.Linear(8, 8), nn.ReLU())})
    def InAThread(self: Any, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        in_a_thread(lambda: found.append(self.feed(self.inner(x)).detach()))
        return found[0]

    model = nn.Sequential(Attends(), InAThread())
    seen = watching(model)(torch.randn(1, 2, 4, 8))
    for ask in (lambda one: rollout(one, -1), head_table, lambda one: one.audit()):
        with pytest.raises(NotSeenError, match=r"1 module besides mixed positions.*1\.inner: it ran in a thread"):
            ask(seen)
    assert "1.inner: it ran in a thread in which the watch is not open" in str(seen.report())
    assert len(str(head_table(seen, skip="1.inner")).splitlines()) >= 3


def test_threads_at_once() -> None:
    model = Two()
    inputs = [x() for _ in range(4)]
    with regard.watch(model) as seen:
        start = threading.Barrier(4)

        def work(n: int) -> None:
            with torch.no_grad(), seen.attach():
                start.wait()
                for _ in range(5):
                    model(inputs[n])

        workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [w.start() for w in workers]
        [w.join() for w in workers]
    assert sorted(seen) == sorted([(name, n) for name in ("first", "second") for n in range(20)])
    assert traces() == (0,) * 7


def test_one_watch_is_open_once_in_a_thread_and_closes_where_it_was_opened() -> None:
    model = Two()
    with torch.no_grad(), regard.watch(model) as seen:
        with pytest.raises(ArgumentError, match="open in this thread already"), seen:
            raise AssertionError
        model(x())
    assert len(seen) == 2

    # Two threads, of which neither closes the watch before the other has opened it.
    is_open, may_close, stacks = threading.Event(), threading.Event(), []

    def work() -> None:
        with torch.no_grad(), seen:
            is_open.set()
            may_close.wait(10)
            model(x())
        stacks.append(traces()[3:])

    thread = threading.Thread(target=work)
    with torch.no_grad(), seen:
        thread.start()
        is_open.wait(10)
    assert traces()[3:] == (0,) * 4
    may_close.set()
    thread.join()
    assert stacks == [(0,) * 4]
    assert len(seen) == 4
    assert traces() == (0,) * 7


def test_a_generator_that_another_thread_ends_leaves_the_next_watch_as_it_should_be() -> None:
    model = Two()

    def work() -> Any:
        with regard.watch(model) as seen:
            yield model(x())
        yield seen

    found: list[Any] = []
    steps = work()
    next(steps)
    in_a_thread(lambda: found.append(next(steps)))
    seen = watching(model)(x())
    assert [len(one) for one in (*found, seen)] == [2, 2]
    assert traces() == (0,) * 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks(reentrant: bool) -> None:
    Checkpointed = module(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), lambda: {"block": Two()})

    model, inputs = Checkpointed(), x().requires_grad_()
    model(inputs).sum().backward()
    expected = inputs.grad.clone()
    inputs.grad = None
    with regard.watch(model) as seen:
        model(inputs).sum().backward()
    gradient: Tensor | None = inputs.grad
    assert gradient.equal(expected)
    assert list(seen) == [("block.first", 0), ("block.second", 0)]
    assert "block.first: 1 call recomputed in the backward pass" in str(seen.report())
    assert "block.second: 1 call recomputed" in str(seen.report())
    assert traces() == (0,) * 7


def test_maps_can_be_read_while_watching() -> None:
    model, inputs = Two(), x()
    with torch.no_grad(), regard.watch(model) as seen:
        model(inputs)
        first = seen["first"].dense()
        model(inputs)
    close(first, dense(model.first, inputs).detach())
    assert len(seen) == 4


Attends = module(lambda m, x: F.scaled_dot_product_attention(x, x, x))


def test_another_name_of_a_shared_module_is_told() -> None:
    model = nn.Sequential(*[Attends()] * 3)
    for door in (lambda: regard.watch(model, "2"), lambda: regard.edit(model, {"2": regard.edits.ScaleHeads(0, 0.0)})):
        with pytest.raises(ArgumentError, match="'2' is another name of '0', one module in several places"):
            door()


def test_an_empty_batch_has_a_map() -> None:
    seen = watching(Attends())(torch.randn(0, 2, 5, 4))
    assert seen[""].shape == (0, 2, 5, 5)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_a_transform_of_a_watched_model_is_the_same(transform: Any) -> None:
    Own = module(lambda m, x: regard.attention(x, x, x))

    x, model = torch.randn(1, 2, 4, 8), Own()
    expected = transform(lambda z: model(z).sum())(x)
    with regard.watch(model) as seen:
        assert torch.equal(transform(lambda z: model(z).sum())(x), expected)
    assert len(seen) == 0
