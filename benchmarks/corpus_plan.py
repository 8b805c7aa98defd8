"""A million documents through a model of 7B, on paper: time, money and bytes. python -m benchmarks.corpus_plan

Each number of the table is computed from those of `ASSUMED`.
"""

from typing import NamedTuple

GPUS = (1, 8, 64)


class Assumed(NamedTuple):
    """A number and its source."""

    value: float
    unit: str
    source: str


ASSUMED = {
    "documents": Assumed(1e6, "", "the question"),
    "tokens of a document": Assumed(1000, "", "the question"),
    "parameters": Assumed(6.74e9, "", "Llama 2 7B (arXiv:2307.09288)"),
    "layers": Assumed(32, "", "the same"),
    "heads": Assumed(32, "", "the same"),
    "width": Assumed(4096, "", "the same"),
    "statistics": Assumed(5, "", "the usual ones"),
    "peak of a GPU": Assumed(67e12, "FLOP/s", "H100 SXM in float32 (NVIDIA's data sheet); `measure` runs in float32"),
    "share of the peak": Assumed(0.6, "", "assumed"),
    "share of the pass's tokens/s": Assumed(0.85, "", "assumed; on a CPU `python -m benchmarks corpus` measures it"),
    "price": Assumed(3.0, "$ per GPU and hour", "assumed"),
    "text of a token": Assumed(4.5, "bytes", "assumed"),
    "reading": Assumed(100e6, "bytes/s", "assumed: JSON lines by one process; each rank reads all of them twice"),
    "loading": Assumed(1e9, "bytes/s", "assumed: of the shared disk, for all weights together"),
    "bytes of a row": Assumed(26, "bytes", "measured: heads/ of 60,000 documents of a tiny model, by zstd"),
    "documents of a shard": Assumed(500, "", "the default"),
    "examples": Assumed(5, "", "the default"),
    "bytes of an example": Assumed(
        152, "bytes", "measured, as the rows: of short documents; in `_parts/`, until the end"
    ),
    "merging": Assumed(3.5e-5, "s an example", "measured on one core: reading, and choosing the strongest"),
}
MEANING = (
    "| GPUs | passes, h | reading, h | loading, h | merging, h | in all, h | GPU hours | $ |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Plan(NamedTuple):
    """The hours of a run."""

    gpus: int
    passes: float
    reading: float
    loading: float
    merging: float

    @property
    def hours(self) -> float:
        return self.passes + self.reading + self.loading + self.merging

    @property
    def dollars(self) -> float:
        return self.hours * self.gpus * value("price")


def value(name: str) -> float:
    """An assumed number."""
    return ASSUMED[name].value


def work() -> float:
    """The FLOP of all passes: 2 N a token, and 2 L S d for its causal scores and values."""
    tokens, length = value("documents") * value("tokens of a document"), value("tokens of a document")
    return tokens * (2 * value("parameters") + 2 * value("layers") * length * value("width"))


def rows() -> float:
    """The rows of heads/."""
    return value("documents") * value("layers") * value("heads")


def example_rows() -> float:
    """The examples of all shards, from which the strongest are chosen."""
    shards = value("documents") / value("documents of a shard")
    return shards * value("layers") * value("heads") * value("statistics") * value("examples")


def text_bytes() -> float:
    """The bytes of the documents."""
    return value("documents") * value("tokens of a document") * value("text of a token")


def plan(gpus: int) -> Plan:
    """The hours on so many GPUs."""
    speed = value("peak of a GPU") * value("share of the peak") * value("share of the pass's tokens/s")
    weights = 4 * value("parameters") * gpus
    seconds = (
        work() / speed / gpus,
        2 * text_bytes() / value("reading"),
        weights / value("loading"),
        example_rows() * value("merging"),
    )
    return Plan(gpus, *(one / 3600 for one in seconds))


def page() -> list[str]:
    """The lines of docs/scale.md."""
    lines = ["| assumed | | source |", "|---|---|---|"]
    lines += [f"| {name} | {one.value:,.4g} {one.unit} | {one.source} |" for name, one in ASSUMED.items()]
    lines += ["", MEANING]
    for one in map(plan, GPUS):
        hours = " | ".join(f"{hour:.2f}" for hour in (*one[1:], one.hours))
        lines.append(f"| {one.gpus} | {hours} | {one.hours * one.gpus:,.0f} | {one.dollars:,.0f} |")
    heads, parts = rows() * value("bytes of a row"), example_rows() * value("bytes of an example")
    return [
        *lines,
        "",
        f"Bytes: {text_bytes() / 1e9:.1f} GB of text, {rows():,.0f} rows of `heads/` in {heads / 1e9:.0f} GB, and "
        f"until the end {parts / 1e9:.0f} GB of `_parts/`; the weights are {4 * value('parameters') / 1e9:.0f} GB a "
        "GPU.",
    ]


if __name__ == "__main__":
    print("\n".join(page()))
