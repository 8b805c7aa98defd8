"""Where the time of a training step goes: the operators of `benchmarks.training`'s step, counted by their kind.

    python -m benchmarks training_step   # REGARD_MULTI30K names a folder with train.en.gz and train.de.gz

torch's profiler gives each operator the time that is its own; operators that the table of kinds does not name are
"other". The profiler itself takes time at each operator, so that small ones weigh a little more here than they do.
"""

import os
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import training

TITLE = "Where the time of a training step goes"
HEADER = "| kind | float32, ms | share | bf16 autocast, ms | share |\n|---|---|---|---|---|"
WARM_STEPS, STEPS = 3, 12
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "_Linear"),
    "attention kernels": ("aten::_scaled_dot_product", "_FusedBlocks", "_WholeCall"),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::to", "aten::cat", "aten::fill_", "aten::zero_"),
    "dropout": ("aten::random_", "aten::bernoulli_", "aten::ge", "_Masked", "_ReluNetwork"),
    "norms": ("aten::native_layer_norm",),
    "softmax and loss": ("aten::_softmax", "aten::_log_softmax", "aten::amax", "aten::exp", "_LossOfRows"),
    "activation": ("aten::clamp_min", "aten::relu", "aten::threshold_backward"),
    "optimizer": ("aten::_fused_adamw_", "Optimizer.", "aten::_foreach"),
}


def kind_of(operator: str) -> str:
    """The kind of an operator, by the longest beginning of its name that the table has."""
    operator = operator.removeprefix("autograd::engine::evaluate_function: ")
    named = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if operator.startswith(start)]
    return max(named)[1] if named else "other"


def milliseconds(dtype: torch.dtype | None, batches: list[training.Batch]) -> Counter[str]:
    """The time of each kind in one step."""
    torch.manual_seed(0)
    step = training.our_step(training.our_model().train(), dtype)
    for batch in batches[:WARM_STEPS]:
        step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for batch in batches:
            step(batch)
    found = Counter[str]()
    for event in profiled.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / len(batches)
    return found


def run() -> tuple[list[str], list[str]]:
    folder = os.environ.get("REGARD_MULTI30K")
    if folder is None:
        return [], ["Not run: REGARD_MULTI30K names no folder with Multi30k's train.en.gz and train.de.gz."]
    batches = training.our_batches(training.pairs(Path(folder)))[:STEPS]
    sides = [milliseconds(dtype, batches) for dtype in (None, torch.bfloat16)]
    rows = []
    for kind in [*KINDS, "other"]:
        cells = [f"{side[kind]:.1f} | {side[kind] / side.total():.1%}" for side in sides]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    whole = " | ".join(f"{side.total():.1f} | 100 %" for side in sides)
    flops = 6 * sum(places(batch) for batch in batches) / len(batches)
    rates = [flops / side["matrix products"] / 1e6 for side in sides]
    note = f"The products run at {rates[0]:.0f} and {rates[1]:.0f} GFLOP/s."
    return [*rows, f"| all | {whole} |"], [note]


def places(batch: training.Batch) -> int:
    """The multiplications of a forward pass: each token's, in all matrices that it passes through."""
    source, _, shifted, target = batch
    attention, forward = 4 * training.DIM**2, 2 * training.DIM * training.HIDDEN
    encoder = training.LAYERS * source.numel() * (attention + forward)
    # Keys and values of the source are made for each token of the source.
    crossed = training.LAYERS * 2 * training.DIM**2 * (source.numel() - shifted.numel())
    decoder = training.LAYERS * shifted.numel() * (2 * attention + forward) + crossed
    return encoder + decoder + training.VOCABULARY * training.DIM * int((target != training.PAD).sum())
