"""`AttentionMonitor` in a loop of one's own, and the numbers of its heads against dense weights."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.errors import ArgumentError
from regard.watching import AttentionMonitor
from regard.watching.monitor import measured_heads, write_picture, writers_of_lightning, writers_of_trainer
from tests.modules import module, parts, watching


def ended(monitor: AttentionMonitor, model: Any, x: torch.Tensor, **told: Any) -> dict[str, float]:
    monitor.begin(model, 1, **told)
    model(x)
    return monitor.end()


def sharp_encoder() -> nn.TransformerEncoder:
    model = encoder()
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[12:16] *= 40.0  # the keys of head 1
    return model


def encoder(dropout: float = 0.0) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def trained(model: Any, monitor: AttentionMonitor | None, steps: int = 4) -> list[dict[str, float]]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        if monitor is not None:
            monitor.begin(model, step)
        loss = model(torch.randn(3, 6, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if monitor is not None:
            found.append(monitor.end())
        optimizer.step()
    return found


def test_the_first_step_and_every_nth_are_measured_and_training_keeps_its_bits() -> None:
    plain, watched = encoder(dropout=0.2), encoder(dropout=0.2)
    trained(plain, None)
    monitor = AttentionMonitor(every=2, causal=False)
    found = trained(watched, monitor)
    assert [bool(scalars) for scalars in found] == [True, True, False, True]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert monitor.audited is not None
    assert not monitor.audited.errors


def test_the_numbers_are_those_of_dense_weights_and_the_worst_head_is_named() -> None:
    model, x = sharp_encoder(), torch.randn(3, 6, 8)
    scalars = ended(AttentionMonitor(sequences=2, causal=False), model, x)
    seen = watching(model, context=nullcontext)(x)
    logits = []
    for name in ("layers.0.self_attn", "layers.1.self_attn"):
        weights = seen[name].dense()[:2].detach()
        entropy = torch.special.entr(weights).sum(-1).mean()
        assert scalars[f"attention/{name}/entropy"] == pytest.approx(float(entropy), rel=1e-4)
        assert scalars[f"attention/{name}/first_key"] == pytest.approx(float(weights[..., 0].mean()), rel=1e-4)
        logits.append(seen[name].max_logit()[:2].amax((0, 2)))
        assert scalars[f"attention/{name}/largest_logit"] == pytest.approx(float(logits[-1].max()), rel=1e-4)
    assert [scalars[f"attention/worst/{what}"] for what in ("layer", "head")] == [1, 1]
    assert scalars["attention/worst/largest_logit"] == pytest.approx(float(torch.stack(logits).max()), rel=1e-4)


def test_dead_and_uniform_heads_by_hand() -> None:
    q, k = torch.ones(1, 3, 8, 1), torch.zeros(1, 3, 8, 1)
    k[0, 1, 0] = 20.0  # head 1 looks at the first key alone
    k[0, 2] = torch.linspace(0, 2, 8)[:, None]  # head 2 prefers the last ones
    for mask in (None, regard.causal()):
        heads = measured_heads([{"a": regard.map_of(q, k, mask=mask)}])["a"]
        assert heads.is_dead.tolist() == [False, True, False]
        assert heads.is_uniform.tolist() == [True, False, False]
    padded = regard.map_of(q, k, mask=regard.padding(torch.arange(8)[None] < 0))
    assert not measured_heads([{"a": padded}])["a"].is_uniform.any()


@parts(lambda heads: {"project": nn.Linear(4, 4), "heads": heads})
def WrittenOut(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2) if self.heads else x[:, None]
    return (x @ x.mT).softmax(-1).sqrt() @ x


def test_weights_that_the_model_made_have_no_logits() -> None:
    scalars = ended(AttentionMonitor(causal=False), WrittenOut(heads=True), torch.randn(2, 5, 4))
    assert {name.rpartition("/")[2] for name in scalars} == {"entropy", "first_key", "dead", "uniform"}


def test_a_layer_that_cannot_be_measured_is_named_and_ends_no_run() -> None:
    monitor = AttentionMonitor(causal=False)
    assert ended(monitor, WrittenOut(heads=False), torch.randn(2, 5, 4)) == {}
    assert "heads" in monitor.unread[""]


def test_a_fault_stops_or_warns_and_holds_no_tensors() -> None:
    model, x = module(lambda m, x: nn.functional.scaled_dot_product_attention(x, x, x))(), torch.randn(2, 1, 5, 4)
    with pytest.raises(AssertionError, match=r"Made: 1 layer.*1 error\nerror: the model, call 0"):
        ended(AttentionMonitor(causal=True), model, x)
    monitor = AttentionMonitor(causal=True, on_fault="warn")
    with pytest.warns(UserWarning, match="error: the model, call 0"):
        assert ended(monitor, model, x)
    assert monitor.audited is not None
    assert monitor.audited.errors
    assert [one.observed for one in monitor.audited if one.observed is not None] == []


@pytest.mark.parametrize("told", ["padding", "documents"])
def test_the_audit_is_told_of_the_batch(told: str) -> None:
    monitor = AttentionMonitor(causal=False)
    of = {"padding": torch.arange(6) < torch.tensor([[6], [4]]), "documents": torch.arange(6)[None] // 3}
    with pytest.raises(AssertionError, match=f"{told}="):
        ended(monitor, encoder(), torch.randn(2, 6, 8), **{told: of[told]})
    assert monitor.audited is not None
    assert {one.reason for one in monitor.audited.errors} == {told}


def test_numbers_out_of_range_are_refused() -> None:
    for options in ({"every": 0}, {"sequences": 0}, {"on_fault": "ignore"}):
        with pytest.raises(ArgumentError, match="needs every and sequences"):
            AttentionMonitor(**options)


def test_the_worst_head_has_the_map_of_its_first_sequence() -> None:
    model, monitor, x = sharp_encoder(), AttentionMonitor(causal=False), torch.randn(3, 6, 8)
    ended(monitor, model, x)
    seen = watching(model, context=nullcontext)(x)
    worst = monitor.worst
    assert worst is not None
    assert (worst.layer, worst.head, worst.sizes) == ("layers.1.self_attn", 1, (6, 6))
    torch.testing.assert_close(worst.weights, seen["layers.1.self_attn"].dense()[0, 1].detach())


def test_a_long_map_is_pooled_to_the_size_of_a_picture() -> None:
    monitor = AttentionMonitor(causal=False)
    ended(monitor, encoder(), torch.randn(1, 500, 8))
    assert monitor.worst is not None
    assert (tuple(monitor.worst.weights.shape), monitor.worst.sizes) == ((192, 192), (500, 500))
    assert "500 x 500 pooled" in str(monitor.worst)


class Board:
    def __init__(self) -> None:
        self.got: list[tuple[str, Any, int]] = []

    def add_image(self, tag: str, pixels: Any, global_step: int, dataformats: str) -> None:
        assert dataformats == "HWC"
        self.got.append((tag, pixels, global_step))


class Images:
    def __init__(self) -> None:
        self.got: list[tuple[str, Any, int]] = []

    def log_image(self, key: str, images: list[Any], step: int) -> None:
        self.got.append((key, images[0], step))


class Modules:
    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []

    Image = staticmethod(lambda pixels: ("image", pixels))

    def log(self, given: dict[str, Any]) -> None:
        self.got.append(given)


def test_each_logger_gets_the_picture_by_its_own_interface() -> None:
    monitor, board, images, module = AttentionMonitor(causal=False), Board(), Images(), Modules()
    ended(monitor, sharp_encoder(), torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0)))
    worst = monitor.worst
    assert worst is not None
    callbacks = [SimpleNamespace(tb_writer=board), SimpleNamespace(_wandb=module), SimpleNamespace(tb_writer=None)]
    trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))
    assert write_picture(worst, writers_of_trainer(trainer), 7) == 2
    ((tag, drawn, step),) = board.got
    assert (tag, step, drawn.shape[-1], str(drawn.dtype)) == ("attention/worst/map", 7, 3, "uint8")
    assert drawn.std() > 1
    (given,) = module.got
    name, pixels = given["attention/worst/map"]
    assert (name, pixels.shape[-1], str(pixels.dtype), given["train/global_step"]) == ("image", 3, "uint8", 7)
    for is_first in (True, False):
        loggers = [images, SimpleNamespace(experiment=board), SimpleNamespace(experiment=None)]
        lightning = SimpleNamespace(loggers=loggers, is_global_zero=is_first)
        assert write_picture(worst, writers_of_lightning(lightning), 9) == (2 if is_first else 0)
    assert [(key, step) for key, _, step in images.got] == [("attention/worst/map", 9)]
    assert len(board.got) == 2
