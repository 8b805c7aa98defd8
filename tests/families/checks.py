"""Architectures of transformers under `regard.check`: each at tiny size, on made-up sequences and on its own inputs.

`python -m tests.families.checks FILE [NAME ...]` adds a row for each to a file of JSON lines, and prints the counts.
"""

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import regard
from regard.errors import RegardError
from regard.watching.checks import Checked
from tests.families.__main__ import add_rows
from tests.families.architectures import architectures, build, inputs_for, library, tiny_config
from tests.families.examine import Row, told

PACKED = "attention tells packed documents apart by position_ids, and the recurrence or convolution does not"
STATES = "a right-padded prompt leaves a wrong state for the next step"
POOLED = "by design: texts are padded to one length, and the last place is pooled (modeling_siglip.py:539)"
# By hand, in float64 where it runs: other contents of a document, and a step after a padded prompt, move results by
# 1 to 5, and by 1e-5 at most where nothing was padded.
RECURRENT = (
    "bailing_hybrid", "falcon_h1", "inkling2", "inkling2_text", "inkling_mm_model", "inkling_text", "kimi_linear",
    "lfm2_moe", "lfm3", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
CONFORMER = (
    "convolutions, kept to whose centre nothing moves; the mask (B, 1, T) is asked for rows that are hidden whole, and "
    "none is (modeling_fastspeech2_conformer.py:522-527, 678)"
)
ADDITIVE = (
    "eager attention negates an additive mask: all it should see is -inf, and rows are NaN "
    "(modeling_nemotron_asr_streaming.py:614, 981)"
)
AS_PALIGEMMA = {
    "batch": "without token_type_ids, SDPA is not causal and a mask for padding is (modeling_paligemma.py:256-261)",
    "kernel and eager": "eager attention gets the causal mask",
    "prefix": "where a mask is made, it is causal",
}
DINO = {
    "kernel and eager": "its text model gets a mask of bool, which eager attention adds as 0 and 1",
    "future": "eager attention hides nothing by that mask",
}
KNOWN: Mapping[str, Mapping[str, str]] = {
    # What stands in the padding changes results.
    "canine": {"padding": "unmasked convolutions over characters (modeling_canine.py:204, 262)"},
    "convbert": {"padding": "an unmasked convolution beside attention (modeling_convbert.py:202-220)"},
    "deepseek_v4": dict.fromkeys(
        ("padding", "documents"),
        "blocks of tokens are pooled with padding and other documents in them (modeling_deepseek_v4.py:423-431)",
    ),
    "diffusion_gemma": {
        "padding": "the decoder takes decoder_attention_mask alone, and without it no mask of the prompt "
        "(modeling_diffusion_gemma.py:1277-1284, 1357-1362)"
    },
    **dict.fromkeys(
        ("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan"),
        dict.fromkeys(("padding", "batch"), CONFORMER),
    ),
    "funnel": {"padding": "pooling takes the last token and padding together (modeling_funnel.py:277, 309)"},
    "mobilebert": {"padding": "a token's embedding has those of its neighbours (modeling_mobilebert.py:113)"},
    "nystromformer": {"padding": "a convolution over values reaches it; with weights of 0 the padding changes nothing"},
    "rwkv": {"padding": "attention_mask is unused (modeling_rwkv.py:547)"},
    "sam3_lite_text": {"padding": "positions are stretched over the padded length (modeling_sam3_lite_text.py:82-85)"},
    "sam3_lite_text_text_model": {"padding": "unmasked convolutions (modeling_sam3_lite_text.py:97-110, 136-148)"},
    "siglip": {"padding": POOLED},
    "shieldgemma2": {"padding": "its last place is pooled, by design (modeling_shieldgemma2.py:128)"},
    "yoso": {
        "padding": "1 + mask / 10000 wants an additive mask and gets zeros and ones, which hide nothing "
        "(modeling_yoso.py:356, 684)"
    },
    # A padded batch, or one of two sequences, gives other results.
    "aimv2": dict.fromkeys(
        ("batch", "kernel and eager"),
        "a causal mask is made with an attention_mask, unless SDPA finds no padding in it (modeling_aimv2.py:575)",
    ),
    "autoformer": {
        "batch": "delays are tiled over heads first, values over sequences first: a sequence gets those of another "
        "(modeling_autoformer.py:561-570)"
    },
    "prophetnet": dict.fromkeys(
        ("batch", "future", "cache"), "n-grams take distances of other positions (get_predict_relative_pos_embeddings)"
    ),
    "udop": {"batch": "image patches stand behind the padding, and positions are columns (modeling_udop.py:247, 969)"},
    "colpali": AS_PALIGEMMA,
    "grounding-dino": DINO,
    "mm-grounding-dino": DINO,
    "nemotron3_5_asr": dict.fromkeys(("kernel and eager", "not finite"), ADDITIVE),
    "nemotron_asr_streaming": dict.fromkeys(("kernel and eager", "not finite"), ADDITIVE),
    "nemotron_asr_streaming_encoder": {"kernel and eager": ADDITIVE},
    "paligemma": AS_PALIGEMMA,
    # A cache gives other results.
    "bamba": {"cache": "positions begin anew at each step (modeling_bamba.py:970)", "documents": PACKED},
    **{key: {"documents": PACKED, "cache": STATES} for key in RECURRENT},
    "fsmt": dict.fromkeys(("cache", "future"), "no causal mask is made with use_cache (modeling_fsmt.py:857-866)"),
    "glm5_next": {"cache": STATES},
    "granitemoehybrid": {"cache": STATES},
    "minimax": {
        "documents": PACKED,
        "cache": "reordered beams keep the states of their lightning attention (modeling_minimax.py:72-110)",
    },
    "recurrent_gemma": {"documents": PACKED, "padding": "its recurrence takes no mask of padding"},
    "jamba": {
        "documents": PACKED,
        "cache": "several tokens after a cache are scanned without its state (modeling_jamba.py:596-608)",
    },
    **{key: {"cache": f"several tokens are scanned from 0 (modeling_{key}.py)"} for key in ("mamba", "falcon_mamba")},
    "kyutai_speech_to_text": {"cache": "the cache has the window of the config, and the mask has none (:593, 605)"},
    "moshi": {"cache": "the cache has the window of the config, and the mask has none (modeling_moshi.py:775, 787)",
              "window": "the same"},
    "nemo_speechlm": {"documents": PACKED, "cache": "as nemotron_h, its model of text"},
    "nemotron_h": {
        "documents": PACKED,
        "cache": "a step leaves out time_step_limit, which the scan of a whole sequence keeps "
        "(modeling_nemotron_h.py:563-577, 593)"
    },
    "zaya": {"documents": f"{PACKED} (modeling_zaya.py:234)"},
    "unlimited_ocr": {"cache": "by design: a window over decoded tokens, none over the prompt (:1297-1336)"},
    # What this table made.
    "encoder-decoder": {"future": "made of two encoders here"},
    "vision-encoder-decoder": {"future": "made of two encoders here"},
    "mistral_large4": {"first key dropped": "the indexer has random weights"},
}  # fmt: skip
"""The reasons of findings, without infos, of architectures in transformers 5.23 with random weights, each with its
place in the source of transformers."""


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
    ran = [row for row in rows if "why" not in row]
    lines = [f"{len(rows)} architectures, {len(ran)} built and run"]
    for way in ("made up", "given"):
        checked = [row for row in ran if "why" not in row[way]]
        clean = [row for row in checked if not row[way]["faults"]]
        reasons = Counter(reason for row in checked for reason in set(row[way]["reasons"]))
        lines.append(f"{way}: {len(checked)} checked, {len(clean)} clean; {dict(reasons)}")
    return "\n".join(lines)


def main() -> None:
    path = Path(sys.argv[1])
    add_rows(path, sys.argv[2:], 150, check)
    print(summary([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
