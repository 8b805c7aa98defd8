"""What a folder of Hugging Face's, which many commands take like a run, must hold."""

from fnmatch import fnmatch
from pathlib import Path

from regard.errors import RunFolderError
from regard.files.untrusted import check_tensors


def check_weights(folder: Path) -> None:
    """Check the headers of the safetensors files in a folder, without torch."""
    for path in folder.glob("*.safetensors"):
        check_tensors(path)


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
