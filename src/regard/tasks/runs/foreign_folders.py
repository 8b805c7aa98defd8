"""Folders in Hugging Face's format, which many commands take like a run: how they are told from one."""

from pathlib import Path

from regard.files.atomic import read_json
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


def is_huggingface(folder: Path) -> bool:
    """Whether a folder's config.json belongs to a Hugging Face model and not to a run."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_json(path)


def family_of(folder: Path) -> object:
    """The `model_type` of a Hugging Face folder."""
    return read_json(folder / "config.json").get("model_type")


def check_weights(folder: Path) -> None:
    """Check the headers of the safetensors files in a folder, without torch."""
    for path in folder.glob("*.safetensors"):
        check_tensors(path)
