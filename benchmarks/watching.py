"""regard.watch on GPT-2 and Llama shapes: against the same model unwatched, and against output_attentions=True.

`python -m benchmarks watching` makes the whole table, most of an hour; `python -m benchmarks.watching 256 512` tries
it at these lengths and writes nothing.
"""

import logging
import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch

import regard
from benchmarks.harness import Row, compare
from regard.watching.watch import Seen

TITLE = "Watching a model against not watching it, and against output_attentions=True"
COLUMNS = {
    ": forward, unwatched / watched": "forward: not watched, watched",
    ": output_attentions=True / watched with all five statistics": "output_attentions=True, watched with statistics",
}
"""The columns of the table, by the ends of the rows' names."""
SHAPES = ("GPT-2", "Llama")
LENGTHS = (512, 1024, 2048, 4096, 8192)
EAGER = {512: 1.0, 1024: 1.2, 2048: 3.5, 4096: 5.5}
"""Lengths at which eager fits, and how many times as long it has to take."""
FACTORS, QUADRATIC, SUMMARY = 4096, 4096, 8192
"""Lengths at which memory is measured: of the factors, of all statistics against eager, of keep="summary"."""
LONG = 32_768
STATISTICS: dict[str, Any] = {"k": 8, "rows": 256, "columns": 256}
NAMES = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")


def model(shape: str, length: int, implementation: str = "sdpa") -> torch.nn.Module:
    """GPT-2: 12 layers x 12 heads x 768. Llama: 8 layers, 16 heads in 4 groups, 1024. No head, random weights, fp32."""
    import transformers

    config: Any
    kind: Any

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    if shape == "GPT-2":
        config = transformers.GPT2Config(n_positions=length, vocab_size=1000)
        kind = transformers.GPT2Model
    else:
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, max_position_embeddings=length,
        )  # fmt: skip
        kind = transformers.LlamaModel
    return kind._from_config(config, attn_implementation=implementation).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(1))


def unwatched(of: torch.nn.Module, ids: torch.Tensor) -> object:
    with torch.no_grad():
        return of(ids, use_cache=False)


def watched(of: torch.nn.Module, ids: torch.Tensor, **settings: Any) -> Seen:
    with torch.no_grad(), regard.watch(of, **settings) as seen:
        of(ids, use_cache=False)
    return seen


def with_statistics(of: torch.nn.Module, ids: torch.Tensor) -> object:
    """Five statistics of every head of every layer."""
    seen = watched(of, ids)
    with torch.no_grad():
        return seen, [weights.summary(*NAMES, **STATISTICS) for weights in seen.maps]


def in_one_go(of: torch.nn.Module, ids: torch.Tensor) -> object:
    """The same, computed as the model runs."""
    return watched(of, ids, keep=regard.Summarize(*NAMES, **STATISTICS))


def eager(of: torch.nn.Module, ids: torch.Tensor) -> object:
    with torch.no_grad():
        return of(ids, use_cache=False, output_attentions=True)


class Layer(torch.nn.Module):
    """One layer of attention, 12 heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = torch.nn.Linear(768, 3 * 768), torch.nn.Linear(768, 768)

    def forward(self, x: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 12, 64)).permute(2, 0, 3, 1, 4)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


# -- memory --------------------------------------------------------------------------------------------

PROGRAM = """
import ctypes, gc, sys, torch
from benchmarks import watching as w
torch.set_num_threads(2)
def read(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) / 1024
of, ids = {setup}
w.{run}(of, {warm})  # libraries and the kernels' own buffers
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = read("VmRSS")
kept = w.{run}(of, ids{settings})
print(read("VmHWM") - before, read("VmHWM"), w.held(kept))
"""


def held(kept: object) -> float:
    """What a watch says that it holds, in MiB."""
    return kept.report().held_bytes / 2**20 if isinstance(kept, Seen) else 0.0


def peak_mib(run: str, shape: str, length: int, settings: str = "") -> tuple[float, float, float]:
    """In a fresh process: the peak above the model, the whole peak, and what the watch holds at the end."""
    implementation = "eager" if run == "eager" else "sdpa"
    setup = f"w.model({shape!r}, {length}, {implementation!r}), w.tokens({length})"
    warm = "w.tokens(16)"
    if shape == "layer":
        setup, warm = f"w.Layer().eval(), torch.randn(1, {length}, 768)", "torch.randn(1, 16, 768)"
    program = PROGRAM.format(setup=setup, run=run, warm=warm, settings=settings)
    # Each tensor in a mapping of its own, so that the peak counts what is alive and no holes in glibc's heap.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=environment)
    above, whole, kept = map(float, done.stdout.split())
    return above, whole, kept


def memory(factors: int, quadratic: int, summary: int, long: int) -> list[str]:
    notes = [
        "Memory, on both sides, with MALLOC_MMAP_THRESHOLD_=65536, so that the peak counts what is alive. As it is, "
        "glibc's heap keeps holes as well, and more of them under a watch: 1.7 times the factors were seen at T = 2048."
    ]
    for shape in SHAPES:
        plain = peak_mib("unwatched", shape, factors)[0]
        ours, _, kept = peak_mib("watched", shape, factors)
        notes.append(
            f"{shape}, T = {factors}, peak above the model in a fresh process: unwatched {plain:.0f} MiB, watched "
            f"{ours:.0f} MiB, which is {ours - plain:.0f} more for factors of {kept:.0f} MiB "
            f"(at most 1.05 of them: {_met(ours - plain <= 1.05 * kept)})."
        )
        full, ours, one = (peak_mib(run, shape, quadratic)[0] for run in ("eager", "with_statistics", "in_one_go"))
        notes.append(
            f"{shape}, T = {quadratic}, peak above the model: output_attentions=True {full:.0f} MiB; watched with all "
            f"five statistics {ours:.0f} MiB, a {full / ours:.1f}th (at most a 12th: {_met(12 * ours <= full)}); "
            f"computed as the model runs (keep=Summarize) {one:.0f} MiB."
        )
        plain = peak_mib("unwatched", shape, summary)[0]
        ours, _, kept = peak_mib("watched", shape, summary, ', keep="summary"')
        notes.append(
            f'{shape}, T = {summary}, keep="summary": {ours - plain:+.0f} MiB against unwatched ({plain:.0f} MiB), '
            f"{kept:.0f} MiB of them statistics (at most 95 MiB, which is 100 MB: {_met(ours - plain <= 95.4)})."
        )
    whole = peak_mib("with_statistics", "layer", long)[1]
    dense = 12 * long * long * 4 / 2**30
    notes.append(
        f"One layer of 12 heads, T = {long}, watched with all five statistics: the whole process peaks at "
        f"{whole / 1024:.2f} GiB (under 2 GiB: {_met(whole < 2048)}); its weights alone would take {dense:.0f} GiB."
    )
    return notes


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def run(
    lengths: tuple[int, ...] = LENGTHS,
    against_eager: dict[int, float] = EAGER,
    sizes: tuple[int, int, int, int] = (FACTORS, QUADRATIC, SUMMARY, LONG),
) -> tuple[list[Row], list[str]]:
    rows = []
    for shape in SHAPES:
        for length in lengths:
            of, ids = model(shape, length), tokens(length)
            rows.append(
                compare(
                    f"{shape}, T = {length}: forward, unwatched / watched",
                    partial(unwatched, of, ids),
                    partial(watched, of, ids),
                    target=0.98,
                    seconds=20.0,
                    pairs=3 if length > 2048 else 7,
                )
            )
        for length, target in against_eager.items():
            of, ids, slow = model(shape, length), tokens(length), model(shape, length, "eager")
            rows.append(
                compare(
                    f"{shape}, T = {length}: output_attentions=True / watched with all five statistics",
                    partial(eager, slow, ids),
                    partial(with_statistics, of, ids),
                    target=target,
                    seconds=20.0,
                    pairs=3 if length > 1024 else 7,
                )
            )
    return rows, memory(*sizes)


def main(lengths: list[int]) -> None:
    longest = max(lengths)
    bars = {length: EAGER.get(length, 0.0) for length in lengths}
    _, notes = run(tuple(lengths), bars, (longest, longest, longest, longest))
    print("\n".join(notes))


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]] or [256])
