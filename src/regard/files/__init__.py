"""Safe files: written whole or not at all, locked, with checksums."""
