"""Safe files: written whole or not at all, locked, sealed, memory-mapped."""
