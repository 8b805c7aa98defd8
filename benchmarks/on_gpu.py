"""What attention, its statistics, a watch, training and decoding take on a GPU; `make gpu` runs it.

    python -m benchmarks.on_gpu --device cuda --out benchmarks/RESULTS-GPU.md      and NAME ... for some of the parts

Each part runs in a process of its own, because an error of a kernel ends the process, and is stopped after a while.
`--device cpu` is a rehearsal at tiny sizes: it shows that everything runs, and its times mean nothing.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard.maps.loop.triton_plan import LOG2_E

LONGEST_S = 100
"""A part is stopped after so many seconds."""
SECONDS, PAIRS = 1.0, 5
"""How long a pair of runs is repeated, and how often at least."""
Run = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """Two runs, in turns."""

    what: str
    peer_ms: float
    ours_ms: float
    ratio: float
    """peer / ours: the median of the pairs, and the quartiles."""
    low: float
    high: float
    peer_mib: float
    ours_mib: float
    """Peak memory of a run above what stood before it; 0 where it is not known."""
    bar: str = ""

    def __str__(self) -> str:
        return (
            f"| {self.what} | {self.peer_ms:.2f} | {self.ours_ms:.2f} | {self.ratio:.2f} ({self.low:.2f} to "
            f"{self.high:.2f}) | {self.peer_mib:.0f} | {self.ours_mib:.0f} | {self.bar} |"
        )


HEADER = (
    "| setting | peer, ms | ours, ms | peer / ours: median (quartiles) | peer, MiB | ours, MiB | aim |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Place:
    """Where it runs, and how large."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether sizes are the real ones."""
        return self.device.type == "cuda"

    def size(self, real: int, tiny: int) -> int:
        """The real size, or that of a rehearsal."""
        return real if self.is_gpu else tiny

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Random numbers; zeros would be faster than what users have."""
        return torch.randn(shape, device=self.device, dtype=torch.float32 if not self.is_gpu else dtype).to(dtype)

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, run: Run) -> float:
        """Milliseconds of one run, the device's work included."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return 1e3 * (time.perf_counter() - start)

    def peak(self, run: Run) -> float:
        """MiB that a run takes above what stood before it."""
        if not self.is_gpu:
            run()
            return 0.0
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self.wait()
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def compare(self, what: str, peer: Run, ours: Run, bar: str = "") -> Measured:
        """Both in turns, after a run of each to warm up and one to see its memory."""
        sides = (peer, ours)
        for run in sides:
            run()
        memory = [self.peak(run) for run in sides]
        times: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + (SECONDS if self.is_gpu else 0.0)
        while len(times[0]) < PAIRS or (time.perf_counter() < end and len(times[0]) < 200):
            for side in (0, 1) if len(times[0]) % 2 else (1, 0):
                times[side].append(self.timed(sides[side]))
        ratios = [a / b for a, b in zip(*times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        peer_ms, ours_ms = map(statistics.median, times)
        return Measured(what, peer_ms, ours_ms, middle, low, high, memory[0], memory[1], bar)


def gradients(function: Callable[..., Any], *tensors: Tensor) -> Run:
    """A run that makes the gradients of the tensors."""

    def run() -> object:
        leaves = [t.detach().requires_grad_() for t in tensors]
        output = function(*leaves)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return run


# -- the parts -----------------------------------------------------------------------------------------


def flash(place: Place) -> Iterator[Measured]:
    """F.scaled_dot_product_attention against ours, without weights and with."""
    for length in (place.size(2048, 64), place.size(8192, 96)):
        q, k, v = (place.normal(place.size(4, 1), place.size(16, 2), length, 128) for _ in range(3))

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return regard.attention(q, k, v, mask=regard.causal())

        def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return regard.attention(q, k, v, mask=regard.causal(), return_weights=True).output

        what = f"causal, bf16, T = {length}"
        with torch.no_grad():
            for name, ours in (("forward", plain), ("forward, weights asked", weighed)):
                yield place.compare(f"{what}: {name}", partial(sdpa, q, k, v), partial(ours, q, k, v))
        yield place.compare(f"{what}: forward and backward", gradients(sdpa, q, k, v), gradients(plain, q, k, v))


LIMITS = {(8, 128): 1.0, (9, 128): 1.17, (9, 64): 2.2, (10, 128): 2.0}
"""Forward passes that rows and columns take at least where every unit is busy, by the compute capability and the width:
docs/design/gpu.md has the instructions that they were counted from.
"""


def statistic(place: Place, width: int = 128) -> Iterator[Measured]:
    """Five statistics, column sums, and each of the two programs alone, against forward passes of cuDNN and flash.

    Then column sums against kernels of others, where they are installed.
    """
    names = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")
    kernels = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    card = torch.cuda.get_device_capability(place.device)[0] if place.is_gpu else 0
    limit = LIMITS.get((card, width))
    bar = "" if limit is None else f"limit {1 / limit:.2f}"
    for length in (place.size(2048, 64), place.size(8192, 96), place.size(65_536, 128)):
        heads = place.size(32 if length < 10_000 else 4, 2)
        q, k, v = (place.normal(1, heads, length, width) for _ in range(3))
        what = f"T = {length}, {heads} heads of {width}, causal, bf16"

        def sdpa(kernel: str, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with sdpa_kernel(kernels[kernel] if place.is_gpu else SDPBackend.MATH):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def asked(*names: str, q: Tensor = q, k: Tensor = k) -> object:
            return regard.map_of(q, k, mask=regard.causal()).summary(*names)

        with torch.no_grad():
            known = regard.attention(q, k, v, mask=regard.causal(), return_weights=True).weights
            ours: dict[str, tuple[Run, str]] = {
                "five statistics": (partial(asked, *names), bar),
                "column sums": (partial(asked, "received"), bar),
                "rows alone (entropy, largest)": (partial(asked, "entropy", "top_weight"), ""),
                "columns alone (log-sum-exp known)": (known.received, ""),
            }
            for kernel in kernels:
                for name, (run, floor) in ours.items():
                    peer = f"{kernel} forward" if place.is_gpu else "math"
                    yield place.compare(f"{name}, {what}, against {peer}", partial(sdpa, kernel), run, floor)
            for peer, run in others(q, k, v) if place.is_gpu else ():
                mine = "columns alone (log-sum-exp known)" if "known" in peer else "column sums"
                yield place.compare(f"{mine}, {what}, against {peer}", run, ours[mine][0])


def others(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, Run]]:
    """Column sums under a causal mask by the kernels of others that are installed."""
    if find_spec("flash_colreduce"):
        from flash_colreduce import flash_colreduce

        yield "flash-colreduce", partial(flash_colreduce, q, k, "sum", is_causal=True)
    if find_spec("flag_attn"):
        from flag_attn import flash_attention

        total = partial(flash_attention, q, k, v, causal=True, return_total_attention=True)
        yield "output and sums of FlagAttention", total
    if find_spec("keys_values"):
        sums: Any = import_module("keys_values.attention.flashinfer_wrapper").triton_score_sum
        lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[1]
        query, key, levels = q.transpose(1, 2), k.transpose(1, 2), (lse.float() * LOG2_E).transpose(1, 2)
        heads, scale = q.shape[1], q.shape[-1] ** -0.5
        yield "keys_values, log-sum-exp known", partial(sums, query, key, levels, scale, heads, 1)


def issued(device: str) -> str:
    """How many of their issue slots the two programs use, by Nsight Compute, if it is installed."""
    tool = shutil.which("ncu")
    if tool is None or not device.startswith("cuda"):
        return ""
    command = [
        tool, "--metrics", "smsp__issue_active.avg.pct_of_peak_sustained_active", "--kernel-name",
        "regex:read_rows|read_columns", "--launch-skip", "2", "--launch-count", "4",
        sys.executable, "-m", "benchmarks.on_gpu", "--only-rows", "--device", device, "statistic",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return f"ncu: stopped after {LONGEST_S} s"
    lines = [line.strip() for line in done.stdout.splitlines() if "issue_active" in line or "read_" in line]
    return "Nsight Compute, issue slots: " + ("; ".join(lines) or (done.stdout.splitlines() or ["nothing"])[-1])


def million(place: Place) -> Iterator[Measured]:
    """A few queries over a million keys: output, and what every key received."""
    keys = place.size(1 << 20, 512)
    q, k, v = (place.normal(1, heads, length, 128) for heads, length in ((32, 16), (8, keys), (8, keys)))
    with torch.no_grad():

        def sdpa() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        def ours() -> object:
            return regard.attention(q, k, v)

        def received() -> object:
            return regard.attention(q, k, v, return_weights=True).weights.summary("received", "top_keys", k=8)

        what = f"16 queries, {keys:,} keys, 32 heads on 8, bf16"
        yield place.compare(f"{what}: output", sdpa, ours)
        yield place.compare(f"{what}: output, received and top 8", sdpa, received)


def watching(place: Place) -> Iterator[Measured]:
    """A random Llama of 7B's shape under a watch, against itself, and against eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    length = place.size(8192, 64)
    config = LlamaConfig(
        hidden_size=place.size(4096, 64), intermediate_size=place.size(11008, 96), vocab_size=place.size(32000, 61),
        num_hidden_layers=place.size(32, 2), num_attention_heads=place.size(32, 4), max_position_embeddings=length,
    )  # fmt: skip
    # Random weights are made on the device, in half precision; the usual start would take minutes.
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=place.device).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    # Its buffers are no parameters.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(place.device)
    tokens = torch.randint(0, config.vocab_size, (1, length), device=place.device)

    def run() -> object:
        return model(tokens, use_cache=False, logits_to_keep=1)

    def watched() -> object:
        with regard.watch(model) as seen:
            run()
        return len(seen)

    def summarized() -> object:
        with regard.watch(model, keep=regard.Summarize("received", "entropy", "top_keys", k=8)) as seen:
            run()
        return len(seen)

    with torch.no_grad():
        what = f"Llama of 7B's shape, T = {length:,}, bf16"
        yield place.compare(f"{what}: watched, against not watched", run, watched)
        yield place.compare(f"{what}: watched and summarized, against not watched", run, summarized)

        def eager() -> object:
            model.set_attn_implementation("eager")
            try:
                return run()
            finally:
                model.set_attn_implementation("sdpa")

        yield place.compare(f"{what}: watched, against eager (whose weights are not kept)", eager, watched)


def training(place: Place) -> Iterator[Measured]:
    """Steps of a small language model, against the same of torch's own layers; tokens/s in the setting."""
    from regard.models import DecoderOnly, DecoderOnlyConfig

    dim, layers, heads = place.size(768, 32), place.size(12, 2), place.size(12, 2)
    vocabulary, batch, length = place.size(32000, 61), place.size(8, 2), place.size(1024, 16)
    config = DecoderOnlyConfig(
        dim=dim, num_heads=heads, num_layers=layers, feed_forward_dim=4 * dim, dropout=0.0, activation="gelu",
        positions="learned", max_length=length,
    )  # fmt: skip
    ours = DecoderOnly(config, vocab_size=vocabulary).to(place.device)
    layer = torch.nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    theirs = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(vocabulary, dim),
            "place": torch.nn.Embedding(length, dim),
            "stack": torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        }
    ).to(place.device)
    text = torch.randint(4, vocabulary, (batch, length + 1), device=place.device)
    places = torch.arange(length, device=place.device)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=place.device)

    def forward(tokens: Tensor) -> Tensor:
        x = theirs["embed"](tokens) + theirs["place"](places)
        return theirs["stack"](x, mask=mask, is_causal=True) @ theirs["embed"].weight.T

    def stepping(model: torch.nn.Module, run: Callable[[Tensor], Any]) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> object:
            with torch.autocast(place.device.type, torch.bfloat16):
                logits = run(text[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        return step

    row = place.compare("", stepping(theirs, forward), stepping(ours, ours))
    speed = [batch * length / (1e-3 * ms) for ms in (row.peer_ms, row.ours_ms)]
    what = f"a training step, {layers} layers of {dim}, {batch} x {length} tokens, bf16 autocast"
    yield Measured(**{**asdict(row), "what": f"{what}: {speed[0]:,.0f} and {speed[1]:,.0f} tokens/s"})


def decoding(place: Place) -> Iterator[Measured]:
    """Greedy decoding of a small language model, against generate of a Llama of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from regard.models import DecoderOnly, DecoderOnlyConfig
    from regard.tasks.generation.beam import greedy
    from regard.tasks.generation.protocol import SearchOf

    dim, layers, heads, steps = place.size(768, 32), place.size(12, 2), place.size(12, 2), place.size(128, 4)
    batch, length = place.size(16, 2), place.size(256, 8)
    config = DecoderOnlyConfig(
        dim=dim, num_heads=heads, num_layers=layers, feed_forward_dim=4 * dim, dropout=0.0, activation="swiglu",
        norm="rms", positions="rotary",
    )  # fmt: skip
    model = DecoderOnly(config, vocab_size=32000).to(place.device).eval()
    sizes = LlamaConfig(
        hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=layers, num_attention_heads=heads,
        vocab_size=32000, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    peer: Any = LlamaForCausalLM(sizes)
    peer = peer.to(place.device).eval()
    text = torch.randint(4, 32000, (batch, length), device=place.device)
    lengths = torch.full((batch,), length, device=place.device)

    def theirs() -> object:
        return peer.generate(
            text, attention_mask=torch.ones_like(text), do_sample=False, max_new_tokens=steps, min_new_tokens=steps
        )

    def ours() -> object:
        # No token ends a text: both sides make as many.
        return greedy(model, SearchOf(text, lengths, bos_id=1, eos_id=-1, max_steps=steps))

    with torch.no_grad():
        row = place.compare("", theirs, ours)
    speed = [batch * steps / (1e-3 * ms) for ms in (row.peer_ms, row.ours_ms)]
    what = f"greedy, {batch} texts of {length}, {steps} steps, {layers} layers of {dim}, fp32, against generate"
    yield Measured(**{**asdict(row), "what": f"{what}: {speed[0]:,.0f} and {speed[1]:,.0f} tokens/s"})


PARTS: dict[str, Callable[[Place], Iterator[Measured]]] = {
    "statistic": statistic, "narrow": partial(statistic, width=64), "watching": watching, "flash": flash,
    "million": million, "training": training, "decoding": decoding,
}  # fmt: skip
"""The first ones are those that have not run yet, if time is short."""


# -- all of them ---------------------------------------------------------------------------------------


def run_part(name: str, device: str) -> tuple[list[Measured], str]:
    """The rows of a part, from a process of its own, and why there are no more."""
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--only-rows", "--device", device, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        output, errors, code = (error.stdout or b"").decode(), f"stopped after {LONGEST_S} s", 124
    rows = [Measured(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]
    last = (errors.strip().splitlines() or ["no reason given"])[-1]
    return rows, "" if code == 0 else f"{name}: ended with {code}, {last[:300]}"


def machine(device: torch.device) -> str:
    """What it runs on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"{name}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-rows", action="store_true", help="print the rows as JSON")
    given = parser.parse_args()
    place = Place(torch.device(given.device))
    if given.only_rows:
        torch.manual_seed(0)
        for name in given.names:
            for row in PARTS[name](place):
                print(json.dumps(asdict(row)), flush=True)
        return
    lines, notes = [], []
    for name in given.names or PARTS:
        rows, note = run_part(name, given.device)
        print(*rows, note, sep="\n", flush=True)
        lines += rows
        notes += [note] if note else []
    notes += [note] if (note := issued(given.device)) else []
    rehearsal = "" if place.is_gpu else " A rehearsal at tiny sizes: these times mean nothing."
    text = f"# Results on a GPU\n\n`make gpu`, {date.today()}, {machine(place.device)}.{rehearsal}\n\n"
    text += "\n".join([HEADER, *map(str, lines)]) + "\n" + "".join(f"\n{note}\n" for note in notes)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")
        print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
