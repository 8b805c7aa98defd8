"""Peak memory of the training steps of `benchmarks.training`, each side in fresh processes.

python -m benchmarks training_memory        with REGARD_MULTI30K naming a folder with train.{en,de}[.gz]
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.harness import KEEP_MEMORY, Row, peak_memory_mib
from benchmarks.training import STEPS, Batch, batches, our_batches, pairs, peers

TITLE = "Peak memory of training steps"


def run() -> tuple[list[Row], list[str]]:
    folder = os.environ.get("REGARD_MULTI30K")
    if folder is None:
        return [], ["Not run: REGARD_MULTI30K names no folder with Multi30k's pairs."]
    os.environ |= KEEP_MEMORY  # for the processes that are started
    found = pairs(Path(folder))
    stream = batches(found)
    theirs, ours = [next(stream) for _ in range(STEPS)], our_batches(found)
    return [], [
        peak_memory(kind, dtype, theirs, ours) for kind, dtype in (("float32", None), ("bf16 autocast", torch.bfloat16))
    ]


def peak_memory(kind: str, dtype: torch.dtype | None, theirs: list[Batch], ours: list[Batch]) -> str:
    """What fresh processes need at their peak for the model, its optimizer and the steps, each on its own batches."""
    found = {}
    with TemporaryDirectory() as folder:
        for name, batches_ in {"ours": ours, **dict.fromkeys(peers(), theirs)}.items():
            path = str(Path(folder) / "batches.pt")
            torch.save(batches_, path)
            make = "b.our_step(b.our_model()" if name == "ours" else f"b.peer_step(b.peers()[{name!r}]()"
            found[name] = peak_memory_mib(
                f"import benchmarks.training as b\nbatches = torch.load({path!r})\n"
                f"def run():\n    step = {make}.train(), {dtype})\n    for batch in batches:\n        step(batch)"
            )
    return f"Peak memory, {kind}: " + ", ".join(f"{name} {mib:,.0f} MiB" for name, mib in found.items()) + "."
