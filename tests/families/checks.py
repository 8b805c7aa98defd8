"""Architectures of transformers under `regard.check`: each at tiny size, on made-up sequences and on its own inputs.

`python -m tests.families.checks FILE [NAME ...]` adds a row for each to a file of JSON lines, and prints the counts.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import regard
from regard.errors import RegardError
from regard.watching.checks import Checked
from tests.families.__main__ import in_a_process
from tests.families.architectures import architectures, build, inputs_for, library, tiny_config
from tests.families.examine import Row, told

ACROSS_PADDING = (
    "canine convbert deepseek_v4 diffusion_gemma fastspeech2_conformer funnel rwkv sam3_lite_text_text_model yoso"
)
"""What stands in padding changes results: convolutions, hashes and pooling go across it, or no mask is taken."""
IN_A_BATCH = "aimv2 autoformer colpali dac dots3_note_text glm_moe_dsa hy_v4 paligemma udop"
"""A padded batch gives other results: blocks and chosen keys count from the first column, or a quantizer rounds."""
WITH_A_CACHE = "bamba jamba kyutai_speech_to_text moshi nemo_speechlm nemotron_h pp_formulanet prophetnet unlimited_ocr"
"""A cache gives other results: positions begin anew (bamba), a state is read for a single token alone (jamba)."""
KNOWN: dict[str, set[str]] = {
    **{key: {"padding"} for key in ACROSS_PADDING.split()},
    **{key: {"batch"} for key in IN_A_BATCH.split()},
    **{key: {"cache"} for key in WITH_A_CACHE.split()},
    "colpali": {"batch", "kernel and eager"},
    "encoder-decoder": {"future"},  # made of two encoders here
    "mistral_large4": {"first key dropped"},
    "moshi": {"cache", "window"},
    "paligemma": {"batch", "kernel and eager", "prefix"},
}
"""The reasons of findings, without infos, of architectures in transformers 5.23 with random weights."""


def check(key: str) -> Row:
    """The findings of an architecture, without infos: of `check(model)` and of `check(model, batch)`."""
    warnings.simplefilter("ignore")
    row: Row = {"architecture": key, "model": architectures()[key]}
    try:
        model = build(getattr(library(), row["model"]), tiny_config(key))
        inputs = inputs_for(key, model)
    except Exception as error:
        return {**row, "why": f"not run: {told(error)}"}
    return {
        **row,
        "made up": _found(lambda: regard.check(model)),
        "given": _found(lambda: regard.check(model, inputs)),
    }


def _found(check: Callable[[], Checked]) -> dict[str, Any]:
    try:
        checked = check()
    except RegardError as error:
        return {"why": told(error)}
    return {
        "faults": [str(one) for one in checked.faults], "reasons": [one.reason for one in checked.faults],
        "infos": sorted({f"{one.reason}: {one.says}" for one in checked.infos}), "trials": len(checked.tried),
    }  # fmt: skip


def summary(rows: list[Row]) -> str:
    """How many were run, how many are clean, and the reasons of the others."""
    ran = [row for row in rows if "why" not in row]
    lines = [f"{len(rows)} architectures, {len(ran)} built and run"]
    for way in ("made up", "given"):
        checked = [row for row in ran if "why" not in row[way]]
        clean = [row for row in checked if not row[way]["faults"]]
        reasons = Counter(reason for row in checked for reason in set(row[way]["reasons"]))
        lines.append(f"{way}: {len(checked)} checked, {len(clean)} clean; {dict(reasons)}")
    return "\n".join(lines)


def main() -> None:
    path, names = Path(sys.argv[1]), sys.argv[2:]
    library()
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    known = {row["architecture"] for row in rows}
    for key in names or [key for key in architectures() if key not in known]:
        row = in_a_process(key, 150, check)
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(summary(rows))


if __name__ == "__main__":
    main()
