"""Means to keep a watch cheap change nothing: the log-sum-exp of a kernel, modules without frames, late copies."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import regard
from regard.watching.hooks.observers import this_thread
from regard.watching.readers.kernel_lse import KERNELS, KernelLse, run_with_lse
from tests.modules import module, parts, watching

ATTEND: Any = F.scaled_dot_product_attention
B, H, T, D = 1, 4, 96, 32


def vectors(*shape: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(*(shape or (B, H, T, D))) for _ in range(count)]


def scores(query: Tensor, key: Tensor, *, is_causal: bool = False, scale: float | None = None) -> Tensor:
    found = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return found.masked_fill(torch.ones(found.shape[-2:]).triu(1).bool(), -torch.inf) if is_causal else found


def dense(query: Tensor, key: Tensor, **settings: Any) -> Tensor:
    return scores(query, key, **settings).softmax(-1)


@pytest.mark.parametrize("settings", [{}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.05}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_kernel_gives_the_bits_of_torch(settings: dict[str, Any], dtype: torch.dtype) -> None:
    given = [one.to(dtype) for one in vectors()]
    output, kernel = run_with_lse(ATTEND, tuple(given), settings)
    assert torch.equal(output, ATTEND(*given, **settings))
    assert kernel.lse is not None
    expected = torch.logsumexp(scores(*given[:2], **settings), -1)
    torch.testing.assert_close(kernel.lse.double(), expected, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)


def test_a_kernel_that_leaves_its_log_sum_exp_out() -> None:
    """That of cuDNN gives None where no gradient is wanted: the map computes its own."""
    operators = {operator: lse for operator, lse in KERNELS.items() if "cudnn" in str(operator)}
    for operator in operators:
        kernel = KernelLse()
        query, key, _ = vectors()
        kernel.ran(operator, query, key, None)
        assert kernel.lse is None
        assert kernel.query is query
    assert operators


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def _under_autocast(call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def _under_the_math_kernel(call: Callable[[], Any]) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return call()


def _under_a_mode(call: Callable[[], Any]) -> Any:
    with _Names() as names:
        result = call()
    assert ATTEND in names.seen  # a mode sees the function that the model called
    return result


@pytest.mark.parametrize("around", [_under_autocast, _under_the_math_kernel, _under_a_mode])
def test_other_calls_keep_the_bits_of_torch(around: Callable[..., Any]) -> None:
    given = vectors()
    output, _ = around(lambda: run_with_lse(ATTEND, tuple(given), {}))
    assert torch.equal(output, around(lambda: ATTEND(*given)))


def test_a_subclass_is_left_to_torch() -> None:
    class Mine(Tensor):
        pass

    given = [one.as_subclass(Mine) for one in vectors()]
    assert isinstance(run_with_lse(ATTEND, tuple(given), {})[0], Mine)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda q, k, v: (q, k.double(), v), {}),
        (lambda q, k, v: (q, k, v.double()), {}),
        (lambda q, k, v: (q, k[..., 1:], v), {}),
        (lambda q, k, v: (q, k[:, :3], v[:, :3]), {}),
        (lambda q, k, v: (q, k, v.tolist()), {}),
        (lambda q, k, v: (q, k), {}),
        (lambda q, k, v: (q, k, v), {"scales": 1.0}),
        (lambda q, k, v: (q, k, v, None, 0.0, False, 0.5), {}),
        (lambda q, k, v: (q, k, v), {"dropout_p": 2.0}),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(change: Any, settings: dict[str, Any]) -> None:
    given = change(*vectors())
    with pytest.raises((RuntimeError, TypeError, ValueError)) as theirs:
        ATTEND(*given, **settings)
    with pytest.raises(theirs.type) as ours:
        run_with_lse(ATTEND, given, settings)
    assert str(ours.value) == str(theirs.value)


def test_the_operator_is_named_as_torch_names_it() -> None:
    _, kernel = run_with_lse(ATTEND, tuple(vectors()), {})
    assert kernel.operator == "aten._scaled_dot_product_flash_attention_for_cpu"


Attend = module(lambda m, x: ATTEND(x, x, x))


class Stopped(BaseException):
    """What torch does not tell the hooks behind a module of, as of Ctrl-C."""


@pytest.mark.parametrize("error", [KeyError, Stopped])
def test_a_plain_module_that_another_hook_stopped_hides_nothing(error: type[BaseException]) -> None:
    @parts(lambda: {"plain": nn.Linear(D, D), "attend": Attend()})
    def Model(self: Any, x: Tensor) -> Tensor:
        with pytest.raises(error):
            self.plain(x)
        return self.attend(x) + ATTEND(x, x, x)

    def stop(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Linear):
            raise error

    model = Model()
    with torch.no_grad(), regard.watch(model) as seen:
        handle = nn.modules.module.register_module_forward_pre_hook(stop)
        try:
            model(vectors()[0])
        finally:
            handle.remove()
        assert this_thread().plain is None
    assert list(seen) == [("attend", 0), ("", 0)]


def test_a_plain_module_that_raises_hides_nothing() -> None:
    @parts(lambda: {"plain": nn.Linear(D, D)})
    def Model(self: Any, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError):
            self.plain(x[..., 1:])
        return ATTEND(x, x, x)

    seen = watching(Model())(vectors()[0])
    assert list(seen) == [("", 0)]


def test_plain_modules_are_looked_at_while_our_mode_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_functions = list[str]()
    mode = type(this_thread().mode)
    real = mode.__torch_function__

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        seen_functions.append(getattr(func, "__name__", str(func)))
        return real(self, func, *rest)

    monkeypatch.setattr(mode, "__torch_function__", counted)

    Model = module(
        lambda m, x: ATTEND(m.plain(x), x, x),
        lambda: {"plain": nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D))},
    )

    model, x = Model(), vectors()[0]
    seen = watching(model)(x)
    assert seen_functions == ["scaled_dot_product_attention"]
    assert list(seen) == [("", 0)]


def test_a_method_of_a_module_of_ours_is_a_call_of_that_module() -> None:
    Model = module(lambda m, x: m.attend.extend(x, None)[0], lambda: {"attend": regard.nn.MultiHeadAttention(D, H)})

    seen = watching(Model())(torch.randn(2, 5, D))
    assert list(seen) == [("attend", 0)]


class Projected(nn.Module):
    """As in GPT-2: queries, keys and values are parts of one product, so that a watch copies."""

    def __init__(self, *, is_causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(H * D, 3 * H * D)
        self.settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (H, D)).transpose(1, 2) for part in self.project(x).split(H * D, -1)
        )  # fmt: skip
        output = ATTEND(query, key, value, **self.settings)
        self.given = [query.clone(), key.clone()]
        query.zero_(), key.zero_()  # a view of them is lost
        return output


@pytest.mark.parametrize("length", [8, T, 300])
@pytest.mark.parametrize(("is_causal", "scale"), [(True, None), (False, 0.2)])
def test_maps_of_copies_are_exact(length: int, is_causal: bool, scale: float | None) -> None:
    model, x = Projected(is_causal=is_causal, scale=scale), torch.randn(2, length, H * D)
    seen = watching(model)(x)
    expected = dense(*model.given, is_causal=is_causal, scale=scale)
    torch.testing.assert_close(seen[""].dense().double(), expected, atol=1e-6, rtol=0)
    assert watching(model, verify=True)(x).calls[0].error < 1e-6
    assert seen.report().held_bytes == 4 * 2 * length * H * (2 * D + 1)


def test_queries_that_lie_in_the_memory_of_the_keys_are_held_once() -> None:
    x = vectors(count=1)[0]
    seen = watching(Attend())(x)
    assert seen.report().held_bytes == 4 * B * H * T * (D + 1)
    # (A vector's product with itself is the largest of its scores, and rounds by the most.)
    torch.testing.assert_close(seen[""].dense().double(), dense(x, x), atol=4e-6, rtol=0)


def test_settings_of_equal_shapes_are_told_apart() -> None:
    x = torch.randn(1, T, H * D)
    for scale in (0.2, 0.1, None):
        model = Projected(scale=scale)
        found = watching(model)(x)[""].dense().double()
        torch.testing.assert_close(found, dense(*model.given, is_causal=True, scale=scale), atol=1e-6, rtol=0)


def test_other_queries_of_the_same_keys_go_on_with_a_late_call() -> None:
    Asks = module(lambda m, query, key: ATTEND(query, key, key))

    @parts(lambda: {"asks": Asks()})
    def Model(self: Any, source: Tensor, steps: list[Tensor]) -> None:
        key = source[..., :D]
        for query in steps:
            self.asks(query[..., :D], key)

    source, steps = vectors(1, H, T, 3 * D, count=1)[0], vectors(1, H, T, 3 * D, count=2)
    seen = watching(Model())(source, steps)
    (whole,) = seen.generations("asks")
    query = torch.cat([step[..., :D] for step in steps], -2)
    torch.testing.assert_close(whole.dense().double(), dense(query, source[..., :D]), atol=1e-6, rtol=0)
