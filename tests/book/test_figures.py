"""The figures of the chapters, compared with the formulas of the tutorials that they stand for, written out here."""

import math

import pytest
import torch
from torch import Tensor

from tests.book.chapters import names_of

pytestmark = pytest.mark.usefixtures("as_installed")


def close(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.detach().double(), expected.detach().double(), rtol=1e-4, atol=atol)


def test_the_kernel_regression_is_d2ls() -> None:
    """d2l 1.0.3, section 11.2: `nadaraya_watson`, with its Gaussian of width sigma and keys down, queries across."""
    names = names_of("01-a-soft-look-up")
    x_train, y_train, x_val = names["keys"], names["values"], names["queries"]
    dists = x_train.reshape((-1, 1)) - x_val.reshape((1, -1))
    k = torch.exp(-(dists**2) / (2 * 0.5**2))
    attention_w = k / k.sum(0)
    close(names["weights"], attention_w.T)
    close(names["predicted"], y_train @ attention_w)
    assert torch.equal(names["truth"](x_val), 2 * torch.sin(x_val) + x_val**0.8)


def test_the_positions_are_d2ls_and_those_of_the_annotated_transformer() -> None:
    """d2l 1.0.3, section 11.6 (60 positions of 32, columns 6 to 9); Rush 2018 (100 of 20, dimensions 4 to 7)."""
    names = names_of("08-where-a-token-stands")
    d2l = torch.zeros(60, 32)
    x = torch.arange(60, dtype=torch.float32).reshape(-1, 1) / torch.pow(10000, torch.arange(0, 32, 2).float() / 32)
    d2l[:, 0::2], d2l[:, 1::2] = torch.sin(x), torch.cos(x)
    close(names["table"], d2l)
    annotated, position = torch.zeros(100, 20), torch.arange(0, 100).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, 20, 2) * -(math.log(10000.0) / 20))
    annotated[:, 0::2], annotated[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    close(names["sinusoidal"](100, 20), annotated, atol=1e-4)
    # d2l 1.0.3, section 11.6.3.2: the projection of position i to position i + delta.
    angle = 5 / 10000 ** (torch.arange(0, 32, 2).double() / 32)
    turn = torch.stack([torch.stack([angle.cos(), angle.sin()], -1), torch.stack([-angle.sin(), angle.cos()], -1)], -2)
    turned = torch.einsum("ixy,piy->pix", turn, d2l.double().unflatten(1, (16, 2))).flatten(1)
    close(names["shifted"](names["table"], 5), turned, atol=1e-4)


def annotated_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Rush 2018, `attention`."""
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    return torch.matmul(scores.masked_fill(mask == 0, -1e9).softmax(dim=-1), value)


def annotated_heads(w: dict[str, Tensor], at: str, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Rush 2018, `MultiHeadedAttention.forward`: four heads of eight."""
    three = zip(w[f"{at}.in_weights.0"].chunk(3), w[f"{at}.in_bias"].chunk(3), (x, y, y), strict=True)
    query, key, value = ((z @ a.T + b).view(len(x), -1, 4, 8).transpose(1, 2) for a, b, z in three)
    joined = annotated_attention(query, key, value, mask).transpose(1, 2).contiguous().view(len(x), -1, 32)
    return joined @ w[f"{at}.out.weight"].T + w[f"{at}.out.bias"]


@pytest.mark.slow
def test_the_transformer_is_that_of_the_annotated_transformer() -> None:
    """Rush 2018: `Encoder`, `Decoder`, `SublayerConnection` (the norm first), `PositionwiseFeedForward`."""
    names = names_of("09-the-transformer")
    w = {name: one.detach() for name, one in names["mine"].state_dict().items()}

    def norm(at: str, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (32,), w[f"{at}.weight"], w[f"{at}.bias"])

    def network(at: str, x: Tensor) -> Tensor:
        hidden = (x @ w[f"{at}.up.weight"].T + w[f"{at}.up.bias"]).relu()
        return hidden @ w[f"{at}.down.weight"].T + w[f"{at}.down.bias"]

    def embedded(at: str, tokens: Tensor) -> Tensor:
        table = names_of("08-where-a-token-stands")["sinusoidal"](tokens.shape[1], 32)
        return w[f"{at}.weight"][tokens] * math.sqrt(32) + table

    source, target, lengths = torch.arange(14).view(2, 7) % 10, torch.arange(10).view(2, 5), torch.tensor([7, 4])
    padding = (torch.arange(7) < lengths[:, None])[:, None, None]  # (2, 1, 1, 7)
    memory = embedded("source_embedding", source)
    for at in ("encoder.0", "encoder.1"):
        y = norm(f"{at}.residuals.0.norm", memory)
        memory = memory + annotated_heads(w, f"{at}.self_attention", y, y, padding)
        memory = memory + network(f"{at}.feed_forward", norm(f"{at}.residuals.1.norm", memory))
    memory, x = norm("encoder_norm", memory), embedded("target_embedding", target)
    subsequent = torch.triu(torch.ones(5, 5), diagonal=1) == 0
    for at in ("decoder.0", "decoder.1"):
        y = norm(f"{at}.residuals.0.norm", x)
        x = x + annotated_heads(w, f"{at}.self_attention", y, y, subsequent)
        x = x + annotated_heads(w, f"{at}.cross_attention", norm(f"{at}.residuals.1.norm", x), memory, padding)
        x = x + network(f"{at}.feed_forward", norm(f"{at}.residuals.2.norm", x))
    close(names["mine"](source, lengths, target), norm("decoder_norm", x) @ w["output.weight"].T, atol=1e-4)


def test_the_loss_of_the_language_model_is_nanogpts_and_its_least_is_shannons() -> None:
    """nanoGPT, `GPT.forward`: the cross-entropy of flattened logits; Shannon 1948: the entropy of a source, by hand."""
    names = names_of("10-a-language-model")
    text = names["test"]
    with torch.no_grad():
        logits, targets = names["causal"](text[:, :-1]), text[:, 1:]
    loss = -logits.log_softmax(-1).view(-1, 17)[torch.arange(targets.numel()), targets.reshape(-1)].mean()
    close(torch.tensor(names["trained"]), loss)
    # A sentence has 1.5 animals in the mean: each is one of 8, and then comes "near" (1/3) or one of 3 verbs (2/3).
    after = -math.log(1 / 3) / 3 - 2 / 3 * math.log(2 / 3 / 3)
    entropy = 1.5 * (math.log(8) + after) / (4 + 3 * 0.5)
    assert abs(-names["chances"].log().mean().item() - entropy) < 0.05


def test_the_induction_score_is_transformerlenss() -> None:
    """TransformerLens' main demo, `induction_score_hook`: the mean of the stripe at 1 - seq_len, second round."""
    names = names_of("11-looking-inside")
    stripe = names["attentions"][1].diagonal(dim1=-2, dim2=-1, offset=1 - 10)[0]
    close(names["induction"], stripe[:, 2:].mean(-1))  # the first two queries are of the first round


def test_the_online_softmax_is_torchs() -> None:
    """`F.scaled_dot_product_attention` and `logsumexp`, in float64."""
    names = names_of("12-fast-and-not-blind")
    q, k, v = (names[name].double() for name in "qkv")
    close(names["output"], torch.nn.functional.scaled_dot_product_attention(q, k, v))
    close(names["lse"], (q @ k.T / 32**0.5).logsumexp(-1))


def test_self_attention_is_that_of_machine_learning_with_pytorch() -> None:
    """Raschka et al. 2022, chapter 16: omega by two loops, the second word's context vector; its own seed and words."""
    names = names_of("02-self-attention-from-nothing")
    torch.manual_seed(123)
    embedded_sentence = torch.nn.Embedding(10, 16)(torch.tensor([0, 7, 1, 2, 5, 6, 4, 3])).detach()
    omega = torch.empty(8, 8)
    for i, x_i in enumerate(embedded_sentence):
        for j, x_j in enumerate(embedded_sentence):
            omega[i, j] = torch.dot(x_i, x_j)
    attention_weights = torch.softmax(omega, dim=1)
    context_vec_2 = torch.zeros(16)
    for j in range(8):
        context_vec_2 += attention_weights[1, j] * embedded_sentence[j]
    assert torch.equal(names["x"], embedded_sentence)
    close(names["scores"], omega)
    close(names["weights"], attention_weights)
    close(names["z"][1], context_vec_2)
    # "We can confirm that the columns sum up to one": these are the rows.
    close(attention_weights.sum(dim=1), torch.ones(8))
    assert (attention_weights.sum(dim=0) - 1).abs().max() > 0.04


def test_scaled_dot_product_attention_is_that_of_machine_learning_with_pytorch() -> None:
    """The same chapter: projections from the left, one query; its matrices have 16 rows, those of ours 4."""
    names = names_of("03-query-key-value")
    x, ours = names["x"], (names["u_query"], names["u_key"], names["u_value"])
    torch.manual_seed(123)
    for u_query, u_key, u_value in (ours, [torch.rand(16, 16) for _ in range(3)]):
        keys, values = u_key.matmul(x.T).T, u_value.matmul(x.T).T
        omega_2 = u_query.matmul(x[1]).matmul(keys.T)
        attention_weights_2 = torch.softmax(omega_2 / len(u_key) ** 0.5, dim=0)
        z, weights = names["attend"](x, u_query, u_key, u_value)
        close(weights[1], attention_weights_2)
        close(z[1], attention_weights_2.matmul(values), atol=1e-4)


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_the_slopes_of_softmax_are_autograds(factor: float) -> None:
    names = names_of("03-query-key-value")
    scores = factor * names["scores"]
    expected = torch.autograd.functional.jacobian(lambda s: s.softmax(0), scores)
    close(names["jacobian"](scores.softmax(0)), expected, atol=1e-6)


def d2l_masked_softmax(scores: Tensor, valid_lens: Tensor) -> Tensor:
    """d2l 1.0.3, section 11.3, on a copy."""
    shape = scores.shape
    valid_lens = torch.repeat_interleave(valid_lens, shape[1]) if valid_lens.dim() == 1 else valid_lens.reshape(-1)
    beyond = torch.arange(shape[-1], dtype=torch.float32)[None, :] >= valid_lens[:, None]
    return torch.softmax(scores.reshape(-1, shape[-1]).masked_fill(beyond, -1e6).reshape(shape), dim=-1)


def test_the_masked_softmax_is_d2ls_but_for_rows_without_keys() -> None:
    names = names_of("04-masks")
    for valid_lens in (torch.tensor([2, 3]), torch.tensor([[1, 3], [2, 4]])):
        ours = names["masked_softmax"](names["scores"], names["visible"](valid_lens, 2, 4))
        close(ours, d2l_masked_softmax(names["scores"], valid_lens))
    empty = torch.tensor([0, 3])
    theirs = d2l_masked_softmax(names["scores"], empty)
    assert (theirs[0] == 0.25).all()
    assert not names["masked_softmax"](names["scores"], names["visible"](empty, 2, 4))[0].any()
    close(names["ways"]["a tutorial, with -1e6"](names["scores"]), theirs)


def test_the_causal_mask_is_the_annotated_transformers() -> None:
    names = names_of("04-masks")
    subsequent_mask = torch.triu(torch.ones((1, 8, 8)), diagonal=1).type(torch.uint8) == 0
    assert torch.equal(names["masks"]["causal"].to_tensor(8), subsequent_mask[0])


def test_additive_attention_is_d2ls() -> None:
    """d2l 1.0.3, `AdditiveAttention`, with the keys, values and lengths of its figure; its two means are known."""
    names = names_of("05-additive-and-bilinear-scores")
    queries, keys, values = names["queries"], torch.ones((2, 10, 2)), torch.arange(40.0).reshape(1, 10, 4)
    features = (queries @ names["w_q"].T).unsqueeze(2) + (keys @ names["w_k"].T).unsqueeze(1)
    weights = d2l_masked_softmax(torch.tanh(features) @ names["w_v"], torch.tensor([2, 6]))
    close(names["by_sum"], torch.bmm(weights, values.repeat(2, 1, 1)))
    close(names["by_sum"][:, 0], torch.tensor([[2.0, 3.0, 4.0, 5.0], [10.0, 11.0, 12.0, 13.0]]))


@pytest.mark.slow
def test_the_alignment_is_that_of_pytorchs_translation_tutorial() -> None:
    """`BahdanauAttention`: Va(tanh(Wa(query) + Ua(keys))), a softmax, a bmm; it has no mask, so all keys are real."""
    names = names_of("06-attention-in-recurrent-networks")
    look = names["translators"]["Bahdanau"][0].look
    query, keys = torch.randn(3, 1, 48), torch.randn(3, 7, 48)
    scores = look.w_v(torch.tanh(look.w_q(query) + look.w_k(keys))).squeeze(2).unsqueeze(1)
    context = torch.bmm(torch.softmax(scores, dim=-1), keys)
    close(look(query[:, 0], keys, torch.ones(3, 7, dtype=torch.bool)), context[:, 0])


def test_many_heads_are_d2ls_and_labmls() -> None:
    names = names_of("07-many-heads")
    x, heads = names["x"], 3
    projected = [x @ names[matrix] for matrix in ("w_q", "w_k", "w_v")]
    # d2l 1.0.3: transpose_qkv joins the heads to the batch, transpose_output takes them apart.
    q, k, v = (
        one.reshape(2, 5, heads, -1).permute(0, 2, 1, 3).reshape(2 * heads, 5, -1) for one in projected
    )  # fmt: skip
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 4**0.5, dim=-1)
    joined = torch.bmm(weights, v).reshape(-1, heads, 5, 4).permute(0, 2, 1, 3).reshape(2, 5, -1)
    close(names["output"], joined @ names["w_o"])
    # labml-nn 0.5.1: time first, scores 'ibhd,jbhd->ijbh', a softmax over j.
    q, k, v = (one.transpose(0, 1).reshape(5, 2, heads, 4) for one in projected)
    attn = torch.softmax(torch.einsum("ibhd,jbhd->ijbh", q, k) * 4**-0.5, dim=1)
    close(names["output"].transpose(0, 1), torch.einsum("ijbh,jbhd->ibhd", attn, v).reshape(5, 2, -1) @ names["w_o"])
    close(names["found"].dense(), attn.permute(2, 3, 0, 1))
