"""The tests are packages, so that two files may bear one name and any folders can be collected in one command."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Of the project. Processes that run a module of the tests (`python -m tests.soak.soak`) start here."""
