"""Packages that take attention weights, unchanged, on our maps: `make consumers` runs each in an environment of its own.

A consumer is two files: `NAME.txt`, what pip installs for it, and `test_NAME.py`, which is skipped where it is absent.
"""
