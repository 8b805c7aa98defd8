"""Speed and memory against the peers: `python -m benchmarks [claim ...]`; results go into RESULTS.md."""
