"""The families of Hugging Face's models, which many commands take like a run, and what their folders must hold."""

from fnmatch import fnmatch
from pathlib import Path

from regard.errors import RunFolderError
from regard.files.model_folder import family_of
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


def check_tokenizer(folder: Path) -> None:
    """Check that a folder of a family that writes has the files of a tokenizer that regard reads."""
    names = {"tokenizer.json"} | ({"source.spm"} if (family := family_of(folder)) in TRANSLATORS else set())
    if family in (*WRITERS, *TRANSLATORS) and not any((folder / name).is_file() for name in names):
        more = ", or source.spm, target.spm and vocab.json" if len(names) > 1 else ""
        raise RunFolderError(f"{folder} has no tokenizer that regard reads: expected tokenizer.json{more}")


NO_TOKENIZER = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "training_args.bin", "*.md", ".git*", "attention.*"),
)
"""Files that belong to no tokenizer of transformers, of any class."""


def check_texts(folder: Path, otherwise: str) -> None:
    """Check that some file of a folder may be a tokenizer's, so that transformers can be asked; it says otherwise what
    to do."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if all(any(fnmatch(name, known) for known in NO_TOKENIZER) for name in names):
        raise RunFolderError(f"{folder} has no tokenizer: {otherwise}")
