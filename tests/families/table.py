"""The page docs/families.md, from the rows of docs/families.jsonl."""

import json
from typing import Any

from tests import ROOT

Row = dict[str, Any]
TOLERANCE = 1e-5
ROWS, PAGE = ROOT / "docs/families.jsonl", ROOT / "docs/families.md"
HEAD = """# Architectures of Hugging Face, one by one

Made by `python docs/make_families.py`, with torch {torch} and transformers {transformers}, on the CPU in float32. Every
architecture of transformers' auto classes is built from a configuration at tiny size with random weights, which are so
large that attention is sharp, fed a batch of two (texts with the second one padded), and watched. Then the same weights
run in eager mode.

- **maps**: how many `regard.watch` saw under the default implementation, of the attentions that ran: those which the
  model reports itself in eager mode with `output_attentions=True`, and those that its eager attention computed beside.
- **mix**: the modules that mix tokens (attention, linear attention, state spaces, convolutions, recurrences, mixtures
  of streams), read / all. All are those of the report, and those where a changed token changes the outputs of others.
- **error**: the largest difference of a map to these weights, outside rows of padding. *rebuilt*: the model shows no
  weights, and the number is the error of the output that is rebuilt from the map, relative to its largest value. *own*:
  the model shows none, and the map holds the weights which it computed itself.
- **bits**: whether all outputs with the watch are the same to the last bit as without.
- **not seen**: what the report names as not seen or as no attention, by the class of the module.
- **enable**: the largest relative difference to eager of the outputs after `regard.huggingface.enable`, then of the
  gradient of all parameters; *refused*: see below.

{summary}
"""

REPORTS = {
    "groupvit": "it reports a soft assignment, and multiplies its values by the hard one",
    "granite_swa": "it reports its weights before the sink takes its part",
    "granitemoe_swa": "it reports its weights before the sink takes its part",
}
"""Models whose `attentions` are not the weights that they multiply with the values."""


def rows() -> list[Row]:
    found = {row["architecture"]: row for row in map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())}
    return [found[name] for name in sorted(found)]


def number(x: float | str | None) -> str:
    return "" if x is None else x if isinstance(x, str) else f"{x:.0e}" if x else "0"


def is_wrong(row: Row) -> bool:
    """Whether a row shows a fault: bits that differ, an error that is no rounding, or a gap without a name."""
    if "why" in row:
        return False
    exact = row.get("error_float64")
    # Eager's softmax is computed in float32 always, so that its float64 is not exact either.
    off = bool(row["wrong"]) and not (isinstance(exact, float) and exact < min(TOLERANCE, row["error"] / 2))
    off = off and not disagrees(row) and not reports_other(row)
    unnamed = bool(row["without_a_map"]) and not row["missed"] and not row.get("others")
    return off or unnamed or (row["repeatable"] and not row["bits"])


def disagrees(row: Row) -> bool:
    """Whether the model itself computes something else in eager mode, where its maps are its weights."""
    apart = row.get("kernels")
    return isinstance(apart, float) and apart > 1e-3 and not row["eager_wrong"] and (row["rebuilt"] or 0) < TOLERANCE


def reports_other(row: Row) -> bool:
    """Whether the model reports other weights than it uses, and its outputs are rebuilt from the map."""
    return row["architecture"] in REPORTS and (row["rebuilt"] if row["rebuilt"] is not None else 1) < TOLERANCE


def error(row: Row) -> str:
    if row["wrong"] and reports_other(row):
        return f"rebuilt {number(row['rebuilt'])}; {REPORTS[row['architecture']]}"
    if row["wrong"] and disagrees(row):
        apart = f"the model's own outputs differ by {number(row['kernels'])} between the two"
        return f"{number(row['eager_error'])} in eager mode; {apart}"
    if row["error"] is not None:
        exact = row.get("error_float64")
        return number(row["error"]) + (f" (float64: {number(exact)})" if isinstance(exact, float) else "")
    if row["maps"] == 0:
        return "-"
    return "own" if row["rebuilt"] is None else f"rebuilt {number(row['rebuilt'])}"


def enabled(row: Row) -> str:
    told = row["enable"]
    if not told["taken"]:
        return "refused"
    if told.get("why"):
        return f"fails: {told['why'][:80]}"
    words = [number(told.get("error")) or "no output to compare"]
    if disagrees(row):
        words[0] += " (as the default differs)"
    if isinstance(told.get("gradient"), float):
        words.append(number(told["gradient"]))
    if told.get("maps_wrong"):
        words.append(REPORTS.get(row["architecture"], f"maps {number(told['maps_error'])}"))
    if told.get("lazy", 0) < told.get("maps", 0):
        words.append(f"{told['maps'] - told['lazy']} of {told['maps']} attentions stay tensors")
    return ", ".join(words)


def line(row: Row) -> str:
    maps = f"{row['maps']} of {row.get('run', 0)}" if row.get("run") else str(row["maps"])
    if row["matched"] < row["maps"] and row.get("run"):
        maps += f" (and {row['maps_unreported']} unreported)" if row["maps_unreported"] else ""
    unseen = "; ".join(_short(reason) for reason in [*row["missed"], *row.get("others", [])])
    bits = "same" if row["bits"] else "differ" if row["repeatable"] else "draws anew each time"
    return f"| {row['architecture']} | {maps} | {mixing(row)} | {error(row)} | {bits} | {unseen} | {enabled(row)} |"


def mixing(row: Row) -> str:
    found = row.get("mixing", {})
    if "all" not in found:
        return "-"
    others = ", ".join(f"{n} {kind}" for kind, n in sorted(found["unread"].items()))
    return f"{found['read']} / {found['all']}" + (f" ({others})" if others else "")


def _short(reason: str) -> str:
    reason = reason.replace("|", "/").replace("\n", " ")
    return reason if len(reason) < 140 else reason[:137] + "..."


def summary(found: list[Row]) -> str:
    ran = [row for row in found if "why" not in row]
    compared = [row for row in ran if row["error"] is not None]
    largest = max((row["error"] for row in compared if not row["wrong"]), default=0.0)
    wrong = [row["architecture"] for row in ran if is_wrong(row)]
    whole = [row for row in compared if not row["without_a_map"] and not is_wrong(row)]
    taken = [row for row in ran if row["enable"]["taken"]]
    apart = [row["architecture"] for row in ran if row["wrong"] and disagrees(row)]
    told = (
        f"{len(found)} architectures; {len(ran)} were built and run, the others are below with the reason. Of "
        f"{len(compared)} that show weights, {len(whole)} agree in every one of them, to {largest:.0e}; "
        f"{sum(bool(row['without_a_map']) for row in compared)} have weights without a map, each named as not seen. "
        f"Watching changed a bit in {sum(row['repeatable'] and not row['bits'] for row in ran)}. "
        f"`enable` took {len(taken)} of {len(ran)}."
    )
    mixed = [row["mixing"] for row in ran if "all" in row.get("mixing", {})]
    whole_models = sum(one["read"] == one["all"] for one in mixed)
    told += (
        f" Of {sum(one['all'] for one in mixed)} modules that mix tokens, {sum(one['read'] for one in mixed)} are "
        f"read; in {whole_models} of {len(mixed)} architectures all are."
    )
    if apart:
        told += f" In {', '.join(apart)} transformers' eager attention and its default one compute different things."
    return told + (f"\n\n**Wrong: {', '.join(wrong)}.**" if wrong else "")


def page() -> str:
    found = rows()
    ran = [row for row in found if "why" not in row]
    versions = next((row["versions"] for row in found if "versions" in row), {"torch": "?", "transformers": "?"})
    lines = [HEAD.format(summary=summary(found), **versions)]
    lines += ["| architecture | maps | mix | error | bits | not seen | enable |", "|---|---|---|---|---|---|---|"]
    lines += [line(row) for row in ran]
    lines += ["", "## Not run, and why", ""]
    lines += [f"- {row['architecture']}: {row['why']}" for row in found if "why" in row]
    lines += ["", "## Refused by `enable`", "", "`regard.watch` reads these.", ""]
    refused: dict[str, list[str]] = {}
    for row in ran:
        if not row["enable"]["taken"]:
            why = row["enable"]["why"].replace(row["model"], "The model")
            refused.setdefault(why, []).append(row["architecture"])
    lines += [f"{why}: {', '.join(names)}.\n" for why, names in refused.items()]
    left = [f"{row['architecture']} ({', '.join(row['enable']['left'])})" for row in ran if row["enable"].get("left")]
    if left:
        lines += [f"Parts that keep their own attention in models that were taken: {', '.join(left)}.\n"]
    return "\n".join(lines).rstrip() + "\n"


def write() -> None:
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
