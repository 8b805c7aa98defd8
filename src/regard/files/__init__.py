"""Safe files: written whole or not at all, locked, sealed, mapped into memory; and what this machine was asked."""
