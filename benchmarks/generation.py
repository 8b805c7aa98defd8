"""A language model that writes one text, against Hugging Face's generate with the same weights.

    python -m benchmarks generation

A Llama and a GPT-2 of 6 layers of 256 with random weights, made here in a temporary folder and read by both. A prompt
of 20 tokens, 100 tokens more, greedily.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, compare
from regard.models.convert import from_huggingface
from regard.tasks.generation.greedy_search import greedy

TITLE = "One text of a language model, against Hugging Face's generate"
DIM, LAYERS, HEADS, VOCABULARY, PROMPT, STEPS = 256, 6, 4, 8_000, 20, 100


def models() -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, intermediate_size=3 * DIM, initializer_range=0.1,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=VOCABULARY, n_embd=DIM, n_layer=LAYERS, n_head=HEADS, initializer_range=0.1, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return {"Llama": LlamaForCausalLM(llama).eval(), "GPT-2": GPT2LMHeadModel(gpt2).eval()}


def run() -> tuple[list[Row], list[str]]:
    torch.manual_seed(0)
    rows, agreeing, prompt = list[Row](), [], torch.randint(4, VOCABULARY, (1, PROMPT))
    for name, theirs in models().items():
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            ours: Any = from_huggingface(Path(folder)).model.eval()

        def generate(theirs: Any = theirs) -> list[int]:
            with torch.inference_mode():
                found = theirs.generate(
                    prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=STEPS,
                    max_new_tokens=STEPS, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            return found[0, PROMPT:].tolist()

        def write(decoder: Any) -> list[int]:
            source, lengths = prompt[:, :-1], torch.tensor([PROMPT - 1])
            return greedy(decoder, source, lengths, bos_id=prompt[:, -1], eos_id=-1, max_steps=STEPS)[0].tokens

        rows.append(compare(f"{name}: {STEPS} tokens", generate, partial(write, ours)))
        same = sum(a == b for a, b in zip(write(ours), generate(), strict=True))
        agreeing.append(f"{name} {same} of {STEPS}")
    return rows, [f"Tokens equal to generate's: {', '.join(agreeing)}."]
