"""Tiny models for planted faults: those of transformers, torch's own, and attention that is written out."""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests import modules
from tests.inspection import huggingface_families as families

VOCABULARY, DIM, HEADS, LENGTH = 61, 32, 4, families.LENGTH
TEXT: dict[str, Any] = families.SMALL | {
    "num_hidden_layers": 3, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
PAIR: dict[str, Any] = families.BART | {"decoder_start_token_id": 2, "init_std": 0.3}
VISION: dict[str, Any] = families.VISION | {
    "num_hidden_layers": 3, "image_size": 16, "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip


def huggingface(
    model: str, settings: dict[str, Any], *, kernel: str | None = None, options: Any = None, **more: Any
) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, model)
    config = kind.config_class(**settings | more)
    if kernel is not None:
        config._attn_implementation = kernel
    torch.manual_seed(5)
    return kind(config, **options or {}).eval()


WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": DIM, "n_layer": 3, "n_head": HEADS, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": DIM, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": HEADS,
    "pad_token_id": 0, "decoder_start_token_id": 0, "initializer_factor": 3.0,
}  # fmt: skip
GEMMA3 = GROUPED | {
    "sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 8,
}  # fmt: skip
llama = partial(huggingface, "LlamaForCausalLM", TEXT)
qwen = partial(huggingface, "Qwen2ForCausalLM", TEXT | {"num_key_value_heads": 2})
gpt2 = partial(huggingface, "GPT2LMHeadModel", GPT2)
bert = partial(huggingface, "BertModel", TEXT, options={"add_pooling_layer": False})
phi3 = partial(huggingface, "Phi3ForCausalLM", TEXT | {"sliding_window": 5, "bos_token_id": 1, "eos_token_id": 2})
gemma2 = partial(huggingface, "Gemma2ForCausalLM", GROUPED | WINDOWS, kernel="eager")
gemma3 = partial(huggingface, "Gemma3ForCausalLM", GEMMA3)
granite_swa = partial(huggingface, "GraniteSWAForCausalLM", TEXT | WINDOWS | {"num_key_value_heads": 2})
bart = partial(huggingface, "BartForConditionalGeneration", PAIR)
t5 = partial(huggingface, "T5ForConditionalGeneration", T5)
vit = partial(huggingface, "ViTModel", VISION, options={"add_pooling_layer": False})
siglip = partial(huggingface, "SiglipVisionModel", VISION)


def paligemma() -> Any:
    import transformers

    text = transformers.GemmaConfig(**TEXT, num_key_value_heads=1, head_dim=8)
    vision = transformers.SiglipVisionConfig(**VISION | {"patch_size": 8}, vision_use_head=False)
    settings = {"vision_config": vision, "text_config": text, "image_token_index": 59, "projection_dim": DIM}
    return huggingface("PaliGemmaForConditionalGeneration", settings, hidden_size=DIM)


def batch(side: str = "right", lengths: Iterable[int] = (11, 8, 5)) -> dict[str, Tensor]:
    real = torch.tensor(list(lengths))[:, None]
    width = int(real.max())
    places = torch.arange(width)
    keep = places < real if side == "right" else places >= width - real
    ids = torch.randint(3, 58, keep.shape, generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids.masked_fill(~keep, 0), "attention_mask": keep.long()}


def plain(rows: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 58, (rows, length), generator=torch.Generator().manual_seed(7))}


def pair(**more: Any) -> dict[str, Tensor]:
    target = torch.randint(3, 58, (3, 6), generator=torch.Generator().manual_seed(8))
    return {**batch(), "decoder_input_ids": target, **more}


def image(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(9))}


def triangle(queries: int, keys: int | None = None, diagonal: int = 0) -> Tensor:
    """True for the keys up to the query's own, where the last query has the last key."""
    keys = queries if keys is None else keys
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + diagonal)


def meddle(modules: Iterable[nn.Module], change: Callable[[Any], Any], names: str = "attention_mask") -> None:
    """Change an argument of modules on its way to them, the first of these names that they have."""
    for one in modules:
        parameters = list(inspect.signature(type(one).forward).parameters)[1:]
        name = next((name for name in names.split("|") if name in parameters), names)

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = name, order: Any = parameters) -> Any:
            given = dict(zip(order, args, strict=False)) | kwargs
            return (), given | {name: change(given.get(name))}

        one.register_forward_pre_hook(before, with_kwargs=True)


def parts(model: nn.Module, end: str, under: str = "") -> list[nn.Module]:
    found = [one for path, one in model.named_modules() if path.endswith(end) and path.startswith(under)]
    assert found, end
    return found


def in_steps(model: Any, ids: Tensor, cuts: Iterable[int], *, positions: Any = None, **more: Any) -> Tensor:
    past, found, at = None, [], 0
    for cut in cuts:
        given = {} if positions is None else {"position_ids": positions(at, cut)}
        out = model(input_ids=ids[:, at : at + cut], past_key_values=past, use_cache=True, **given, **more)
        past, at = out.past_key_values, at + cut
        found.append(out.logits)
    return torch.cat(found, 1)


Stepwise = modules.module(lambda m, **given: m.run(m.model, **given), lambda model, run: {"model": model, "run": run})
"""A model that is read in steps."""


def stepped(model: nn.Module, cuts: Iterable[int], **more: Any) -> nn.Module:
    return Stepwise(model, lambda model, input_ids: in_steps(model, input_ids, cuts, **more))


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor], number: int) -> None:
        super().__init__()
        self.attend, self.number = attend, number
        self.norm, self.into, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, keep: Tensor | None, past: dict[int, Any] | None) -> Tensor:
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.into(self.norm(x)).chunk(3, -1))
        if past is not None:
            if self.number in past:
                key, value = (torch.cat(both, 2) for both in zip(past[self.number], (key, value), strict=True))
            past[self.number] = key, value
        return x + self.out(self.attend(self, query, key, value, keep).transpose(1, 2).flatten(2))


class Text(nn.Module):
    """A model of text of one's own, without a config. `cuts` reads it in steps with a cache."""

    def __init__(
        self,
        attend: Callable[..., Tensor],
        *,
        cuts: Iterable[int] = (),
        start: Callable[[int], int] = int,
        kinds: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.kinds = nn.Embedding(kinds, DIM) if kinds else None
        self.layers = nn.ModuleList(Layer(attend, n) for n in range(4))
        self.head = nn.Linear(DIM, VOCABULARY)
        self.cuts, self.start = tuple(cuts), start

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        if not self.cuts:
            return self.read(input_ids, attention_mask, token_type_ids)
        past: dict[int, Any] = {}
        found, at = [], 0
        for cut in self.cuts:
            found.append(self.read(input_ids[:, at : at + cut], None, None, past, self.start(at)))
            at += cut
        return torch.cat(found, 1)

    def read(self, ids: Tensor, keep: Tensor | None, kinds: Tensor | None, past: Any = None, start: int = 0) -> Tensor:
        x = 3 * self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        if self.kinds is not None and kinds is not None:
            x = x + self.kinds(kinds)
        for layer in self.layers:
            x = layer(x, None if keep is None else keep.bool(), past)
        return self.head(x)


def written(
    query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None = None, *, low: float = -torch.inf, dim: int = -1
) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep, low)
    return scores.softmax(dim) @ value


def causal(layer: Layer, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    mask = triangle(query.shape[2], key.shape[2])
    return sdpa(query, key, value, attn_mask=mask if keep is None else mask & keep[:, None, None])


def both_sides(layer: Layer, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    return sdpa(query, key, value, attn_mask=None if keep is None else keep[:, None, None])


def masked(mask: Callable[[Tensor, Tensor, Any], Tensor | None]) -> Callable[..., Tensor]:
    return lambda layer, query, key, value, keep: sdpa(query, key, value, attn_mask=mask(query, key, keep))


@modules.parts(lambda mask: {"model": Text(causal), "mask": mask})
def Told(self: Any, input_ids: Tensor, **told: Tensor) -> Tensor:
    mask = self.mask(**told)
    for layer in self.model.layers:
        layer.attend = masked(lambda *_: mask)
    return self.model(input_ids)


def twin(attend: Callable[..., Tensor], faulty: Callable[..., Tensor], **options: Any) -> Callable[[bool], nn.Module]:
    return lambda is_faulty: Text(faulty if is_faulty else attend, **options).eval()
