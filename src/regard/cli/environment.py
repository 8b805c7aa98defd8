"""`regard --version --verbose`: the versions of the libraries that compute, and the folders of compiled code."""

import platform
from importlib.metadata import PackageNotFoundError, version

from regard.tensors.readable import is_installed
from regard.version import __version__

LIBRARIES = ("torch", "numpy", "numba", "transformers", "tokenizers", "ctranslate2", "matplotlib", "anywidget")


def environment() -> str:
    """A line for regard, for Python, for each library, and for the code that numba has compiled."""
    lines = [f"regard {__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {_version_of(name)}" for name in LIBRARIES]
    return "\n".join([*lines, f"compiled code: {', '.join(_folders()) or 'none'}"])


def _version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


def _folders() -> list[str]:
    """The folders in which the compiled loops of the maps, of dropout and of short sequences are kept."""
    if not is_installed():
        return []
    from regard.kernels.short_sequences import why_not_vectors
    from regard.maps.loop.one_loop import in_one_loop
    from regard.nn.dropout_decisions import decide
    from regard.tensors.vector_code import kept_code_folder

    try:
        return [kept_code_folder(one) for one in (in_one_loop, decide, why_not_vectors)]
    except RuntimeError:  # no folder can be written
        return []
