"""The calls of a user of a GPU, on the device of `--device`: `make gpu`, or `make gpu DEVICE=cpu` as a rehearsal.

Without that option these tests are skipped: on the CPU others ask the same, and more.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from tests.gpu.checked_statistics import BY_LENGTHS

FAMILIES = ("gpt2", "gpt2, left", "llama", "mistral", "gemma2", "gpt-oss", "bert", "t5", "bart", "vit")
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") is None:
        pytest.skip("no --device was given")


def within(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours.detach().cpu().double(), theirs.detach(), rtol=tolerance, atol=tolerance)


def drawn(dtype: torch.dtype, t: int, s: int, width: int, heads: int, groups: int) -> list[Tensor]:
    shapes = (2, heads, t, width), (2, heads // groups, s, width), (2, heads // groups, s, width)
    return [torch.randn(shape).to(dtype) for shape in shapes]


MASKS: dict[str, Any] = {
    **BY_LENGTHS,
    "documents": lambda t, s: (
        regard.documents(torch.arange(t) // 150, key_ids=torch.arange(s) // 150) & regard.causal()
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["fused", "tiled"])
def test_output_lse_and_gradients(backend: str, mask: str, dtype: torch.dtype, device: torch.device) -> None:
    """Of lengths, widths and groups on which kernels differ, also through the weights."""
    tolerance = 2e-5 if dtype == torch.float32 else 5e-2
    for t, s, width, groups in ((300, 300, 64, 1), (40, 70, 20, 3), (70, 40, 128, 1), (33, 33, 256, 2)):
        tensors = drawn(dtype, t, s, width, 6, groups)
        on = [x.to(device).requires_grad_() for x in tensors]
        exact = [x.double().requires_grad_() for x in tensors]
        where = MASKS[mask](t, s)
        output, weights = regard.attention(*on, mask=where, backend=backend, return_weights=True)
        expected, same = regard.attention(*exact, mask=where, backend="reference", return_weights=True)
        within(output, expected, tolerance)
        within(weights.lse.masked_fill(weights.lse == -torch.inf, 0.0), same.lse.nan_to_num(neginf=0.0), tolerance)
        grad = torch.randn_like(expected)
        ours = (output * grad.to(device, dtype)).sum() + weights.entropy().square().sum()
        theirs = (expected * grad).sum() + same.entropy().square().sum()
        pairs = zip(torch.autograd.grad(ours, on), torch.autograd.grad(theirs, exact), strict=True)
        for one, other in pairs:
            within(one / other.abs().max(), other / other.abs().max(), 2 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "window", "lengths", "prefix"])
def test_statistics(mask: str, dtype: torch.dtype, device: torch.device) -> None:
    """Together (one kernel, where Triton is) and one by one, against float64 on the CPU."""
    query, key, _ = drawn(dtype, 300, 270, 64, 4, 2)
    where = MASKS[mask](300, 270)
    names = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max", "distance", "top_weight")
    with torch.no_grad():
        ours = regard.map_of(query.to(device), key.to(device), mask=where)
        theirs = regard.map_of(query.double(), key.double(), mask=where)
        found, expected = [dict[str, Any](m.summary(*names, k=4, rows=32, columns=32)) for m in (ours, theirs)]
        for name in names:
            one, other = (f[name].values if name == "top_keys" else f[name] for f in (found, expected))
            within(one, other, 2e-5)
        same = dict[str, Any](ours.summary(*names, k=4, rows=32, columns=32))
        # No sum is atomic: the same question has the same bits.
        for name in names:
            pair = [f[name] if name != "top_keys" else f[name].values for f in (found, same)]
            assert torch.equal(*pair), name
        within(ours.received(), theirs.received(), 2e-5)
        within(ours.entropy(), theirs.entropy(), 2e-5)
        x = torch.randn(270, 3)
        within(ours @ x.to(device), theirs @ x.double(), 1e-4)


def test_additive_scores(device: torch.device) -> None:
    tensors = [torch.randn(shape) for shape in ((2, 70, 48), (2, 90, 48), (2, 90, 8), (48,))]
    on, exact = ([x.to(device).requires_grad_() for x in tensors], [x.double().requires_grad_() for x in tensors])
    losses = [
        regard.attention(q, k, v, score=regard.Additive(w), mask=regard.lengths(torch.tensor([90, 30]))).square().sum()
        for q, k, v, w in (on, exact)
    ]
    for one, other in zip(torch.autograd.grad(losses[0], on), torch.autograd.grad(losses[1], exact), strict=True):
        within(one / other.abs().max(), other / other.abs().max(), 2e-5)


def test_rotary_positions_that_are_kept_for_the_next_layer(device: torch.device) -> None:
    """By the stream that made them: a second call, one on another stream, and one of a graph that is captured."""
    x = torch.randn(2, 3, 40, 16)
    expected, on = regard.Rotary(16).rotate(x.double(), 5), x.to(device)
    for _ in range(2):
        within(regard.Rotary(16).rotate(on, 5), expected, 1e-5)
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = regard.Rotary(16).rotate(on, 5)
    torch.cuda.synchronize(device)
    within(found, expected, 1e-5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = regard.Rotary(16, base=100.0).rotate(on, 5)
    within(regard.Rotary(16, base=100.0).rotate(on, 5), regard.Rotary(16, base=100.0).rotate(x.double(), 5), 1e-5)
    graph.replay()
    within(captured, regard.Rotary(16, base=100.0).rotate(x.double(), 5), 1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_watch_reads_the_models_own_weights(name: str, device: torch.device) -> None:
    pytest.importorskip("transformers")
    from tests.inspection import huggingface_families as families

    family = families.FAMILIES[name]
    model, inputs = family.build().to(device), {n: t.to(device) for n, t in family.inputs().items()}
    with torch.no_grad():
        before = model(**inputs)
        with regard.watch(model, verify=True) as seen:
            during = model(**inputs)
    for one, other in zip(before.values(), during.values(), strict=True):
        assert not isinstance(one, Tensor) or torch.equal(one, other)
    assert not seen.report().missed, str(seen.report())
    expected = family.eager()
    for weights, eager in zip(seen.maps[family.first :: family.every], expected, strict=True):
        dense = weights.dense().cpu()
        dead = (dense == 0).all(-1)
        # Matrix products of the GPU are not those of the CPU: hidden states differ by this much after two layers.
        assert (dense - eager).abs().masked_fill(dead[..., None], 0).max() < 1e-3


def small_model(device: torch.device) -> Any:
    from regard.models import DecoderOnly, DecoderOnlyConfig

    config = DecoderOnlyConfig(dim=64, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=96, dropout=0.0)
    torch.manual_seed(2)
    return DecoderOnly(config, vocab_size=40).to(device).eval()


def test_the_decoders_find_what_they_find_on_the_cpu(device: torch.device) -> None:
    from regard.tasks.generation.config import Beam
    from tests.searches import beam_search, greedy

    text, lengths = torch.randint(4, 40, (3, 9)), torch.tensor([9, 5, 1])
    options: dict[str, Any] = {"bos_id": 1, "eos_id": 2, "max_steps": 12}
    found = []
    for where in (device, torch.device("cpu")):
        model, given = small_model(where), (text.to(where), lengths.to(where))
        with torch.no_grad():
            state = greedy(model, *given, **options)
            beams = beam_search(model, *given, beam=Beam(size=3), **options)
        found.append(([h.tokens for h in state], [[h.tokens for h in hypotheses] for hypotheses in beams]))
    assert found[0] == found[1]


def test_a_short_training(device: torch.device) -> None:
    model = small_model(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.randint(4, 40, (16, 33), device=device)
    half = torch.bfloat16
    losses = []
    for _ in range(30):
        with torch.autocast(device.type, half):
            logits = model(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0], losses


def test_the_demo(device: torch.device, tmp_path: Path) -> None:
    """`make demo` on the device; on the CPU it takes two minutes, so that a rehearsal leaves it out."""
    lacking = [name for name in ("tyro", "babel", "lightning_fabric", "tokenizers", "rich") if not find_spec(name)]
    if lacking:
        pytest.skip(f"the demo needs {', '.join(lacking)}, which are not installed here")
    if device.type == "cpu":
        pytest.skip("`make demo` itself runs on the CPU")
    command = [sys.executable, "-m", "regard", "demo", "--out", str(tmp_path / "demo"), "--device", str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert done.returncode == 0, done.stderr[-3000:]
