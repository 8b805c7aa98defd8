"""Rotary positions against the paper's rotation matrix and against Hugging Face's models and scalings."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.call.rotary.rotary import Half, Interleaved, Layout, Rotary
from regard.call.rotary.scalings import DynamicNTK, Llama3, LongRoPE, PositionInterpolation, Scaling, YaRN
from regard.errors import ArgumentError, ShapeError

SCALINGS: list[Scaling | None] = [
    None,
    PositionInterpolation(3.0),
    DynamicNTK(factor=2.0, original_length=8),
    YaRN(factor=4.0, original_length=64),
    Llama3(factor=8.0, original_length=64),
    LongRoPE(short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(1.0, 2.0, 4.0, 8.0), factor=4.0, original_length=16),
]


def rotation_matrix(position: int, frequencies: list[float], layout: str) -> Tensor:
    """The paper's equation 15, its planes where the layout has them."""
    planes = len(frequencies)
    matrix = torch.zeros(2 * planes, 2 * planes, dtype=torch.float64)
    for n, frequency in enumerate(frequencies):
        a, b = (2 * n, 2 * n + 1) if layout == "interleaved" else (n, n + planes)
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = cos, -sin, sin, cos
    return matrix


@pytest.mark.parametrize("layout", [Half(), Interleaved()], ids=str)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_each_vector_is_turned_by_the_papers_matrix(layout: Layout, fraction: float) -> None:
    rotary = Rotary(8, base=100.0, layout=layout, fraction=fraction)
    width = int(8 * fraction)
    name = "interleaved" if isinstance(layout, Interleaved) else "half"
    frequencies = [100.0 ** (-2 * n / width) for n in range(width // 2)]
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    expected = x.clone()
    for t in range(5):
        expected[..., t, :width] = x[..., t, :width] @ rotation_matrix(t + 7, frequencies, name).T
    torch.testing.assert_close(rotary.rotate(x, 7), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("layout", [Half(), Interleaved()], ids=str)
def test_scores_depend_on_the_distance_alone(layout: Layout, scaling: Scaling | None) -> None:
    rotary = Rotary(8, layout=layout, scaling=scaling)
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    length = 5000

    def score(i: int, j: int) -> Tensor:
        return rotary.rotate(q, i, length=length) @ rotary.rotate(k, j, length=length).mT

    for distance in (-3, 0, 1, 40):
        at = torch.stack([score(start, start + distance) for start in (3, 50, 1234, 4321)])
        torch.testing.assert_close(at, at[:1].expand_as(at), rtol=0, atol=1e-11)
    if scaling is None:
        assert (score(0, 1) - score(1, 0)).abs() > 1e-3  # the sign of the distance counts
        torch.testing.assert_close(rotary.rotate(q, 99).norm(), q.norm())


def test_an_offset_positions_and_their_ranks_agree() -> None:
    rotary, x = Rotary(4), torch.randn(2, 3, 5, 4)
    whole = rotary.rotate(torch.nn.functional.pad(x, (0, 0, 6, 0)))[..., 6:, :]
    same = torch.testing.assert_close
    same(rotary.rotate(x, 6), whole)
    same(rotary.rotate(x, torch.tensor(6)), whole)
    same(rotary.rotate(x, torch.tensor([6, 6])), whole)
    same(rotary.rotate(x, positions=torch.arange(6, 11)), whole)
    same(rotary.rotate(x, positions=torch.arange(6, 11).expand(2, 5)), whole)
    same(rotary.turn(x, *rotary.cos_sin(torch.arange(6, 11))), whole)
    each = rotary.rotate(x, torch.tensor([1, 6]))
    same(each[1], whole[1])
    same(each[0], rotary.rotate(x[0], 1))
    same(rotary.rotate(x[:, 0], torch.tensor([1, 6])), each[:, 0])  # (batch, T, D)
    same(rotary.rotate(x[1, 0], 6), whole[1, 0])  # (T, D)
    same(rotary.rotate(x[None], torch.tensor([[1, 6]])), each[None])  # two dimensions of batch


def test_angles_are_exact_far_out_and_in_half_precision() -> None:
    """At position 1,000,003 an angle in float32 errs by up to 0.03, one in bfloat16 by thousands."""
    x, far = torch.randn(1, 4, dtype=torch.float64), 1_000_003
    expected = x @ rotation_matrix(far, [1.0, 0.01], "half").T
    torch.testing.assert_close(Rotary(4).rotate(x, far), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(Rotary(4).rotate(x.float(), far).double(), expected, rtol=0, atol=1e-6)
    half = Rotary(4).rotate(x.bfloat16(), far)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0, atol=2e-2)


def test_gradients_turn_back() -> None:
    rotary = Rotary(4, layout=Interleaved(), scaling=YaRN(factor=2.0, original_length=8), fraction=0.5)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary.rotate(x, 3), x, fast_mode=True)


def hugging_face(kind: str, head_dim: int = 8, longest: int = 64, base: float = 10_000.0, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    parameters = {"rope_type": kind, "rope_theta": base, **options}
    return transformers.LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=longest, rope_parameters=parameters, attn_implementation="eager",
    )  # fmt: skip


ORIGINAL: dict[str, Any] = {"original_max_position_embeddings": 16}
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 7.5]}
FAMILIES = [
    ("linear", {"factor": 3.0}, PositionInterpolation(3.0)),
    ("dynamic", {"factor": 2.5}, DynamicNTK(factor=2.5, original_length=64)),
    ("yarn", {"factor": 4.0, **ORIGINAL}, YaRN(factor=4.0, original_length=16)),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096}, YaRN(factor=4.0, original_length=4096)),
    (
        "yarn",
        {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "attention_factor": 0.8, **ORIGINAL},
        YaRN(factor=4.0, original_length=16, beta_fast=4.0, beta_slow=0.5, truncate=False, attention_factor=0.8),
    ),
    (
        "llama3",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        Llama3(factor=8.0, original_length=16),
    ),
    (
        "llama3",
        {"factor": 2.0, "low_freq_factor": 0.1, "high_freq_factor": 9.0, **ORIGINAL},
        Llama3(factor=2.0, original_length=16, low_frequency=0.1, high_frequency=9.0),
    ),
    ("longrope", {"factor": 4.0, **FACTORS, **ORIGINAL}, LongRoPE(factor=4.0, original_length=16, **FACTORS)),
    (
        "longrope",
        {"factor": 4.0, "attention_factor": 1.3, **FACTORS, **ORIGINAL},
        LongRoPE(factor=4.0, original_length=16, attention_factor=1.3, **FACTORS),
    ),
]


@pytest.mark.parametrize(("kind", "options", "scaling"), FAMILIES)
@pytest.mark.parametrize("length", [5, 16, 17, 64, 65, 300])
def test_scalings_are_hugging_faces(length: int, kind: str, options: dict[str, Any], scaling: Scaling) -> None:
    config = hugging_face(kind, **options)
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    theirs, magnitude = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    ours = Rotary(8, scaling=scaling).frequencies(length)
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-6, atol=0)
    assert scaling.magnitude() == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("dim", [2, 8, 64, 128])
@pytest.mark.parametrize("base", [25.0, 500_000.0])
@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("yarn", YaRN(factor=40.0, original_length=2048)),
        ("llama3", Llama3(factor=40.0, original_length=2048)),
        ("dynamic", DynamicNTK(factor=40.0, original_length=2048)),
    ],
    ids=["yarn", "llama3", "dynamic"],
)
def test_scalings_are_hugging_faces_at_the_sizes_of_models(kind: str, scaling: Scaling, base: float, dim: int) -> None:
    options = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0}}.get(kind, {})
    options |= {} if kind == "dynamic" else {"original_max_position_embeddings": 2048}
    longest = 2048 if kind == "dynamic" else 81920
    config = hugging_face(kind, head_dim=dim, longest=longest, base=base, factor=40.0, **options)
    if dim == 2 and kind == "dynamic":
        with pytest.raises(ArgumentError, match="more than 2 rotated dimensions, got 2"):
            Rotary(dim, base, scaling=scaling).frequencies(9000)
        return
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    theirs, _ = rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=9000)
    ours = Rotary(dim, base, scaling=scaling).frequencies(9000)
    torch.testing.assert_close(ours.float(), theirs, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("kind", "options", "scaling"), [("default", {}, None), *FAMILIES])
@pytest.mark.parametrize("length", [9, 80])
def test_attention_is_llamas(length: int, kind: str, options: dict[str, Any], scaling: Scaling | None) -> None:
    """Whole layers of the model with random weights: grouped heads, causal, rotated and scaled."""
    config = hugging_face(kind, **options)
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs, embedding = llama.LlamaAttention(config, 0).eval(), llama.LlamaRotaryEmbedding(config)
    x, positions = 3 * torch.randn(2, length, 32), torch.arange(length)[None]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(length, length).masked_fill(hidden, -torch.inf)[None, None]
    with torch.no_grad():
        expected = theirs(x, embedding(x, positions), mask)[0]
        q, k, v = (p(x).unflatten(-1, (-1, 8)).movedim(2, 1) for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
        rotary = Rotary(8, scaling=scaling)
        output = regard.attention(rotary.rotate(q), rotary.rotate(k), v, mask=regard.causal())
        torch.testing.assert_close(theirs.o_proj(output.movedim(1, 2).flatten(-2)), expected, rtol=0, atol=2e-5)


def test_the_interleaved_layout_is_gpt_js() -> None:
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    x = torch.randn(2, 7, 3, 12)  # their layout: batch, length, heads, dim
    sin, cos = gptj.create_sinusoidal_positions(20, 8)[None, 4:11].split(4, dim=-1)
    turned = gptj.apply_rotary_pos_emb(x[..., :8], sin, cos)
    expected = torch.cat([turned, x[..., 8:]], -1).movedim(1, 2)
    rotary = Rotary(12, layout=Interleaved(), fraction=8 / 12)
    torch.testing.assert_close(rotary.rotate(x.movedim(1, 2), 4), expected, rtol=0, atol=2e-6)


def test_the_half_layout_and_its_fraction_are_gpt_neoxs() -> None:
    transformers = pytest.importorskip("transformers")
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    config = transformers.GPTNeoXConfig(
        hidden_size=48, num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    x = torch.randn(2, 3, 7, 16)
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(x, torch.arange(4, 11)[None])
    expected, _ = neox.apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(Rotary(16, fraction=0.25).rotate(x, 4), expected, rtol=0, atol=2e-6)


def test_errors_say_what_to_do() -> None:
    x = torch.zeros(2, 3, 5, 4)
    with pytest.raises(ArgumentError, match="must be even and at least 2, got 3"):
        Rotary(3)
    with pytest.raises(ArgumentError, match=r"in \(0, 1\], got 1.5"):
        Rotary(4, fraction=1.5)
    with pytest.raises(ShapeError, match=r"vectors of width 6, got \(2, 3, 5, 4\)"):
        Rotary(6).rotate(x)
    with pytest.raises(ShapeError, match=r"shape \(5,\) or \(2, 5\), got \(4,\)"):
        Rotary(4).rotate(x, positions=torch.arange(4))
    with pytest.raises(ShapeError, match=r"batch's shape \(2,\), got \(3,\)"):
        Rotary(4).rotate(x, torch.arange(3))
    with pytest.raises(ArgumentError, match="an offset or positions, not both"):
        Rotary(4).rotate(x, 2, positions=torch.arange(5))
    with pytest.raises(ArgumentError, match=r"at least 1, got 0\.5"):
        PositionInterpolation(0.5)
    with pytest.raises(ArgumentError, match="0 < beta_slow < beta_fast, got 3 and 2"):
        YaRN(factor=2.0, original_length=16, beta_fast=2, beta_slow=3)
    with pytest.raises(ArgumentError, match=r"low_frequency < high_frequency, got 4\.0 and 4\.0"):
        Llama3(low_frequency=4.0)
    with pytest.raises(ArgumentError, match="at least 2, got 0"):
        DynamicNTK(factor=2.0, original_length=0)
    with pytest.raises(ArgumentError, match="each of the 2 pairs of the 4 rotated dimensions, got 4"):
        Rotary(4, scaling=LongRoPE(factor=4.0, original_length=16, **FACTORS)).rotate(x)
