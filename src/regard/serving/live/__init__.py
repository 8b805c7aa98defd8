"""The live page: its HTML, style and scripts, which are joined with those of the page."""
