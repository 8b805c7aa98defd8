"""The families of Hugging Face's models, which many commands take like a run, by what they do."""

from pathlib import Path

from regard.files.untrusted import check_tensors

READERS = (
    *("bert", "roberta", "xlm-roberta"),
    *("dinov2", "dinov2_with_registers", "vit"),
)
"""The families regard reads and that neither translate nor continue a text."""
WRITERS = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3", "olmo2", "olmo3", "phi3"),
    "glm4",
    *("smollm3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"),
)
"""The families that continue a text."""
TRANSLATORS = ("bart", "blenderbot", "marian", "pegasus", "t5")
"""The families that translate one."""


def check_weights(folder: Path) -> None:
    """Check the headers of the safetensors files in a folder, without torch."""
    for path in folder.glob("*.safetensors"):
        check_tensors(path)
