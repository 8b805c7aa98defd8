"""The version of the package, read by `pyproject.toml`, and those of others."""

__version__ = "0.1.0"


def installed_version(package: str) -> str | None:
    from importlib import metadata  # no start needs it

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
