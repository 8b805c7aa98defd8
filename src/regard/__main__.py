"""`python -m regard` is `regard`; under torchrun too: `torchrun --nproc-per-node 2 -m regard train ...`."""

from regard.cli.main import program

if __name__ == "__main__":
    program()
