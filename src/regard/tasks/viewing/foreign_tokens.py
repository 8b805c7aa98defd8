"""The tokenizer of a foreign folder: ids, and one label for each token, as its tokenizer shows it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, DataError
from regard.huggingface.load_folder import quiet
from regard.tasks.text.labels import label_of_each
from regard.tasks.text.tokenizers import is_byte_level


class ForeignTokens:
    """The tokenizer of a folder, or numbers as labels where it has none."""

    def __init__(self, folder: Path, library: Any) -> None:
        self._folder = folder
        self._own = _tokenizer(folder, library)
        self._special = set() if self._own is None else set(self._own.all_special_ids)
        fast = getattr(self._own, "backend_tokenizer", None)
        self._byte_level = fast is not None and is_byte_level(fast)

    def encode(self, text: str, **options: Any) -> list[int]:
        """The ids of a text with the special tokens around it; of a target with `text_target=`."""
        if self._own is None:
            raise ArgumentError(f"{self._folder} has no tokenizer: give ids of tokens by --tokens 5 17 or --ids FILE")
        try:
            found: list[int] = self._own(**(options or {"text": text}), verbose=False)["input_ids"]
        except Exception as error:  # of any kind: a tokenizer of a stranger
            raise DataError(f"the tokenizer of {self._folder} gives up on the text: {error!s:.200}") from error
        return found

    def target(self, text: str) -> list[int]:
        """The ids of a target; without a tokenizer the text has them."""
        if self._own is not None:
            return self.encode("", text_target=text)
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ArgumentError(
                f"{self._folder} has no tokenizer: --target takes ids of tokens, such as '5 17', got {text!r:.60}"
            ) from None

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        if self._own is None:
            return [str(token) for token in ids]
        pieces = [piece or f"#{token}" for piece, token in zip(self._own.convert_ids_to_tokens(ids), ids, strict=True)]
        return label_of_each(pieces, [token in self._special for token in ids], byte_level=self._byte_level)


def _tokenizer(folder: Path, library: Any) -> Any:
    """The folder's own tokenizer; None if it has no file of one. transformers then makes an empty one up."""
    try:
        with quiet(library):
            found = library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
            raise DataError(f"{folder}: transformers cannot load its tokenizer: {error!s:.300}") from error
        return None
    names = {"tokenizer.json", "tokenizer_config.json", *type(found).vocab_files_names.values()}
    return found if any((folder / name).is_file() for name in names) else None
