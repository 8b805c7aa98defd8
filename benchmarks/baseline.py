"""Questions about attention by three ways: all weights kept, a hook that reduces them layer by layer, and a watch.

    python -m benchmarks baseline              # every case
    python -m benchmarks.baseline sources      # one case, and writes nothing
    python -m benchmarks.baseline gpt2 1024    # at this length

A hook on each layer is the fair baseline of a script that needs statistics alone: eager attention makes the weights of
one layer, the hook reduces them, and they are freed before the next layer. Each way runs in a fresh process of one
thread, in float32, with random weights of the named shape: its processor time, and its peak of memory above the model.
The answers of the three are compared.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from typing import Any

import torch
from torch import Tensor, nn

import regard

TITLE = "Statistics without weights: kept, hooked, watched"
HEADER = (
    "| case | `output_attentions=True`: s, MiB | a hook on each layer: s, MiB | watched: s, MiB | difference |\n"
    "|---|---|---|---|---|"
)
WAYS = ("kept", "hooked", "watched")
Answers = list[Tensor]
Reduce = Callable[[Tensor], Answers]


@dataclass(frozen=True)
class Case:
    """A model with its input, and a question to each layer, of dense weights (B, H, T, S) and of a map alike."""

    what: str
    length: int
    make: Callable[[int, str], tuple[nn.Module, Tensor]]
    dense: Reduce
    of_map: Callable[[Any], Answers]
    keep: regard.Summarize | None = None
    """The statistics that the watch takes as the model runs; None for the calls themselves."""


def of_transformers(kind: str, batch: int = 1, **sizes: Any) -> Callable[[int, str], tuple[nn.Module, Tensor]]:
    def make(length: int, implementation: str) -> tuple[nn.Module, Tensor]:
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(vocab_size=1000, **sizes)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation=implementation)
        return model.eval(), torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(1))

    return make


def summary_of_dense(weights: Tensor) -> Answers:
    return [weights.sum(-2), torch.special.entr(weights).sum(-1), weights.topk(8).values]


def summary_of_map(weights: regard.AttentionMap) -> Answers:
    return [weights.received(), weights.entropy(), weights.top_keys(8).values]


ROWS = 64


def sources_of_dense(weights: Tensor) -> Answers:
    """Of the last rows the weight of each quarter of the text and the largest, and of every row that of the sink."""
    last = weights[..., -ROWS:, :]
    quarters = torch.stack([part.sum(-1) for part in last.chunk(4, -1)], -1)
    return [quarters, last.amax(-1), weights[..., 0].clone()]


def sources_of_map(weights: regard.AttentionMap) -> Answers:
    keys = weights.shape[-1]
    quarters = [(keys * part // 4, keys * (part + 1) // 4) for part in range(4)]
    last = weights.only(rows=slice(-ROWS, None))
    return [last.spans(keys=quarters), last.top_keys(1).values[..., 0], weights.mass(regard.lengths(1))]


def with_logits(length: int, implementation: str) -> tuple[nn.Module, Tensor]:
    """A Llama that, written out, hands back its logits before the softmax in the place of weights."""
    from transformers.models.llama import modeling_llama

    def written_out(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> Any:
        logits = (query @ key.mT) * scaling + mask
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), logits

    vars(modeling_llama)["eager_attention_forward"] = written_out
    return of_transformers("Llama", **LLAMA)(length, implementation)


SUMMARY = regard.Summarize("received", "entropy", "top_keys", k=8)
LLAMA = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip
ALBERT = {"hidden_size": 256, "embedding_size": 128, "intermediate_size": 512, "num_attention_heads": 8}
CASES = {
    "gpt2": Case(
        "GPT-2 small's shape: keys received, entropy, eight largest weights of each row, of every head", 4096,
        of_transformers("GPT2", n_positions=8192), summary_of_dense, summary_of_map, SUMMARY,
    ),
    "sources": Case(
        "Llama, 4 layers of 8 heads: 64 rows as spans and largest weights, the sink of every row", 4096,
        of_transformers("Llama", **LLAMA), sources_of_dense, sources_of_map,
    ),
    "logits": Case(
        "Llama, 4 layers of 8 heads: the largest logit of every row", 4096,
        with_logits, lambda logits: [logits.amax(-1)], lambda weights: [weights.max_logit()],
    ),
    "atoms": Case(
        "ALBERT, one layer 12 times, 8 heads, 8 sequences: the largest weight of each row of one head", 512,
        of_transformers("Albert", 8, **ALBERT), lambda weights: [weights[:, 5].amax(-1)],
        lambda weights: [weights[:, 5].top_keys(1).values[..., 0]],
    ),
}  # fmt: skip


# -- the three ways ------------------------------------------------------------------------------------


@torch.no_grad()
def kept(case: Case, model: nn.Module, ids: Tensor) -> list[Answers]:
    return [case.dense(weights) for weights in model(ids, output_attentions=True).attentions]


@torch.no_grad()
def hooked(case: Case, model: nn.Module, ids: Tensor) -> list[Answers]:
    found: list[Answers] = []
    with reduced(model, lambda weights: found.append(case.dense(weights))):
        model(ids)
    return found


@contextmanager
def reduced(model: nn.Module, reduce: Callable[[Tensor], object]) -> Iterator[None]:
    """While it is open, the weights that an attention module of transformers hands back are reduced and dropped."""

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        reduce(output[1])
        return (output[0], None, *output[2:])

    named = [module for module in model.modules() if type(module).__name__.endswith("Attention")]
    handles = [module.register_forward_hook(hook) for module in named]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def watched(case: Case, model: nn.Module, ids: Tensor) -> list[Answers]:
    with regard.watch(model) if case.keep is None else regard.watch(model, keep=case.keep) as seen:
        model(ids)
    return [case.of_map(weights) for weights in seen.maps]


# -- fresh processes -----------------------------------------------------------------------------------

PROGRAM = """
import ctypes, gc, json, time, torch
from benchmarks import baseline as b
torch.set_num_threads(1)
def read(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) / 1024
case, way = b.CASES[{name!r}], {way!r}
model, ids = case.make({length}, "sdpa" if way == "watched" else "eager")
getattr(b, way)(case, model, ids[:, :{warm}])  # libraries, compiled loops, and the kernels' own buffers
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before, start = read("VmRSS"), time.process_time()
found = getattr(b, way)(case, model, ids)
seconds, peak = time.process_time() - start, read("VmHWM") - before
torch.save(found, {path!r})
print(json.dumps([seconds, peak]))
"""


def measured(name: str, way: str, length: int, path: str) -> tuple[float, float]:
    """The processor's seconds and the peak in MiB; the answers go into a file."""
    program = PROGRAM.format(name=name, way=way, length=length, path=path, warm=min(length, 512))
    # Each tensor in a mapping of its own, so that the peak counts what is alive and no holes in glibc's heap.
    settings = {**environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True, env=settings)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def row(name: str, length: int) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{way}.pt" for way in WAYS]
        figures = [measured(name, way, length, path) for way, path in zip(WAYS, paths, strict=True)]
        first, *others = [torch.load(path, weights_only=True) for path in paths]
        apart = max(
            float((a - b).abs().max())
            for other in others
            for of_layer, mine in zip(other, first, strict=True)
            for a, b in zip(of_layer, mine, strict=True)
        )
    cells = [f"{seconds:.1f}, {peak:,.0f}" for seconds, peak in figures]
    line = f"| {CASES[name].what}, T = {length} | {' | '.join(cells)} | {apart:.0e} |"
    print(line, flush=True)
    return line


def run() -> tuple[list[str], list[str]]:
    note = (
        "One thread, float32, each way in a fresh process: processor time, and peak memory above the model, which "
        "counts what is alive (MALLOC_MMAP_THRESHOLD_=65536). The difference is the largest of any answer, in its own "
        "unit, from those of the kept weights."
    )
    return [row(name, case.length) for name, case in CASES.items()], [note]


if __name__ == "__main__":
    row(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else CASES[sys.argv[1]].length)
