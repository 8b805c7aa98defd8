"""What programs do with attention weights: ours against the eager way. `python -m benchmarks consumers` runs all uses.

One file is one use, and `python -m benchmarks consumers.divergence` runs one. `frame.py` says what a file has.
"""
