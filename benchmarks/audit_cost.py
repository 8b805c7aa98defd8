"""An audit, and a comparison with a reference, against the forward pass: `python -m benchmarks audit_cost`."""

import logging
from typing import Any

import torch

import regard
from benchmarks.harness import Row, Run, compare
from regard.watching.checks.reference import Given, compared

TITLE = "An audit and a comparison with a reference, against the forward pass"
LENGTHS = (2048, 8192)


def setting(length: int, *, is_padded: bool) -> tuple[Any, dict[str, torch.Tensor]]:
    """A Llama of two layers, 8 heads in 4 groups, width 512, and one sequence; or two, of which one is padded."""
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    given = {"input_ids": torch.randint(3, 1000, (1 + is_padded, length))}
    if is_padded:
        given["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [length * 3 // 4]])).long()
    return model, given


def sides(length: int, *, is_padded: bool, with_reference: bool) -> tuple[Run, Run]:
    """The forward pass, and the pass with its audit or with the comparison."""
    model, given = setting(length, is_padded=is_padded)

    @torch.no_grad()
    def forward() -> object:
        return model(**given, use_cache=False)

    @torch.no_grad()
    def audited() -> object:
        if with_reference:
            found = compared(Given(model, given), Given(model, given))
            assert not found
            return found
        with regard.watch(model) as seen:
            model(**given, use_cache=False)
        found = seen.audit()
        assert not found
        return found

    return forward, audited


def run() -> tuple[list[Row], list[str]]:
    """Rows for each length, with and without padding."""
    rows = []
    for length in LENGTHS:
        for is_padded, with_reference in ((False, False), (True, False), (False, True)):
            what = "compared with a reference" if with_reference else "audited, two sequences, one padded"
            name = f"T = {length}: forward / {what if is_padded or with_reference else 'audited'}"
            forward, audited = sides(length, is_padded=is_padded, with_reference=with_reference)
            rows.append(compare(name, forward, audited, seconds=4.0, pairs=2))
            print(rows[-1], flush=True)
    return rows, ["Two layers of width 512 with 8 heads, float32; an audit has the watched pass in its time."]


if __name__ == "__main__":
    run()
