"""Every architecture that transformers builds, at tiny size, held against its own weights: docs/families.md."""
