"""Safe files: written whole or not at all, locked, sealed with a checksum, mapped into memory; and what this machine was asked."""
