"""DeBERTa-v2 and v3 (He et al. 2021, arXiv:2006.03654 and arXiv:2111.09543): BERT with disentangled attention."""

from functools import partial

from torch import nn

from regard.errors import RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.bert import NoHead, Transform, move_around_attention, move_head
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.encoder_only import EncoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import DisentangledAttention, FeedForward, LearnedPositions, NoPositions, PostNorm, RelativeVectors

HEADS = {
    True: ("cls.predictions", "transform.dense", "transform.LayerNorm"),
    False: ("lm_predictions.lm_head", "dense", "LayerNorm"),
}
"""The names of the head for masked tokens, by the setting `legacy`."""


def deberta(settings: Settings, weights: Weights) -> EncoderOnly:
    """A DeBERTa-v2 or v3 encoder, with its head for masked tokens if there is one."""
    _refuse_others(settings)
    weights.strip_prefix("deberta.")
    weights.drop("embeddings.position_ids", "pooler.*", "classifier.*", "qa_outputs.*", "mask_predictions.*")
    dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
    norm = partial(nn.LayerNorm, eps=settings.get("layer_norm_eps", float, 1e-7))
    dropout, layers = settings.get("hidden_dropout_prob", float, 0.1), settings.get("num_hidden_layers", int)
    longest, furthest = (settings.get(f"max_{name}", int, -1) for name in ("position_embeddings", "relative_positions"))
    furthest = furthest if furthest > 0 else longest
    buckets = settings.get("position_buckets", int, -1)
    if buckets > 0 and not 0 < buckets // 2 < furthest - 1:
        raise RunFolderError(
            f"{settings.source}: position_buckets is {buckets}, for max_relative_positions of {furthest}: half of it "
            "must be at least 1 and end before them"
        )
    is_shared = settings.get("share_att_key", bool, False)
    norms_vectors = "layer_norm" in settings.get("norm_rel_ebd", str, "none").lower()
    has_places = settings.get("position_biased_input", bool, True)
    has_head, tied = _move(settings, weights, is_shared=is_shared, norms_vectors=norms_vectors, has_places=has_places)
    attention = partial(
        DisentangledAttention,
        dim,
        heads,
        max_distance=furthest if buckets > 0 else None,
        own_projections=not is_shared,
        head_dim=settings.optional("attention_head_size", int),
        dropout=settings.get("attention_probs_dropout_prob", float, 0.1),
    )
    activation = settings.one_of("hidden_act", ACTIVATIONS, "gelu")
    feed_forward = partial(FeedForward, dim, settings.get("intermediate_size", int), activation=activation)
    stack = StackParts(
        attention=[attention] * layers,
        feed_forward=[feed_forward] * layers,
        residual=partial(PostNorm, dim, dropout=dropout, norm=norm),
        positions=partial(LearnedPositions, longest, dim) if has_places else NoPositions,
        relative=partial(
            RelativeVectors, buckets if buckets > 0 else furthest, dim, norm if norms_vectors else nn.Identity
        ),
        embedding_norm=partial(norm, dim),
    )
    parts = OneStackParts(
        dim=dim,
        stack=stack,
        num_segments=settings.get("type_vocab_size", int, 0),
        embedding_scale=1.0,
        dropout=dropout,
        head=partial(Transform, dim, activation, norm) if has_head else NoHead,
        tied_output=tied,
        output_bias=has_head,
    )
    return weights.build(lambda: EncoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _refuse_others(settings: Settings) -> None:
    terms = settings.values.get("pos_att_type")
    terms = terms.split("|") if isinstance(terms, str) else terms
    if not isinstance(terms, list) or sorted(map(str, terms)) != ["c2p", "p2c"]:
        raise RunFolderError(f"{settings.source}: pos_att_type is {terms!r:.80}; regard reads c2p and p2c together")
    if not settings.get("relative_attention", bool, False):
        raise RunFolderError(f"{settings.source}: regard reads no DeBERTa without relative_attention")
    if settings.get("conv_kernel_size", int, 0) > 0:
        raise RunFolderError(f"{settings.source}: regard reads no DeBERTa with a convolution (conv_kernel_size)")
    dim = settings.get("hidden_size", int)
    if settings.get("embedding_size", int, dim) != dim:
        raise RunFolderError(f"{settings.source}: regard reads no DeBERTa whose embedding_size is not its hidden_size")


def _move(
    settings: Settings, weights: Weights, *, is_shared: bool, norms_vectors: bool, has_places: bool
) -> tuple[bool, bool]:
    names = HEADS[settings.get("legacy", bool, True)]
    head = move_head(settings, weights, names, "embeddings.word_embeddings.weight")
    weights.move("embeddings.LayerNorm", "embedding_norm")
    if has_places:
        weights.move("embeddings.position_embeddings", "positions")
    else:
        weights.drop("embeddings.position_embeddings.weight")
    if settings.get("type_vocab_size", int, 0):
        weights.move("embeddings.token_type_embeddings", "segments")
    weights.move("encoder.rel_embeddings", "relative")
    if norms_vectors:
        weights.move("encoder.LayerNorm", "relative.norm")
    for number in range(settings.get("num_hidden_layers", int)):
        theirs, ours = f"encoder.layer.{number}.attention", f"layers.{number}.self_attention"
        projections = ("self.query_proj", "self.key_proj", "self.value_proj", "output.dense")
        weights.attention(theirs, f"{ours}.content", projections)
        if not is_shared:
            places = (f"{theirs}.self.pos_query_proj", f"{theirs}.self.pos_key_proj")
            weights.join(places, f"{ours}.place.weight", f"{ours}.place.bias")
        move_around_attention(weights, number)
    return head
