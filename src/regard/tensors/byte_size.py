"""Sizes in bytes for people."""


def human(size: float) -> str:
    """A size in bytes, in the unit that leaves it at least 1.

    >>> human(1536), human(3 * 2**40)
    ('1.5 KiB', '3.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
