"""Tests that other projects wrote, run on our modules: docs/project/suites.md has the results."""
