"""Everything that a GPU is needed for, in under ten minutes: make gpu, or `python -m tests.gpu --device cuda`.

First the tests that have a device, each file in a process of its own, because an error of a kernel ends the process;
then the benchmarks, into benchmarks/RESULTS-GPU.md. `--device cpu` is a rehearsal at tiny sizes, whose table goes to
build/RESULTS-GPU.md. It needs torch, pytest, hypothesis, jaxtyping and, for models to watch, transformers; it uses no
network.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec

import torch

from tests import ROOT

FILES = ("tests/gpu/test_on_device.py", "tests/core/test_contracts.py")
LONGEST_S = 200
PYTEST = ("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-rs")
WANTED = ("pytest", "hypothesis", "jaxtyping")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            f"skipped: the tests and benchmarks on a GPU, because torch {torch.__version__} sees none here; "
            "`make gpu DEVICE=cpu` rehearses them at tiny sizes"
        )
        return 0
    lacking = [name for name in WANTED if not find_spec(name)]
    if lacking:
        print(f"this needs {', '.join(lacking)}: install them, or run it with a Python that has them")
        return 2
    if not find_spec("transformers"):
        print("skipped: watch on models of Hugging Face, because transformers is not installed here")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    environment |= {"REGARD_UNCHECKED_SHAPES": "1"}
    start, verdicts = time.monotonic(), {}
    has_xdist = find_spec("xdist") is not None
    for file in FILES:
        options = PYTEST if has_xdist else tuple(o for o in PYTEST if o not in ("-n", "0"))
        command = [sys.executable, *options, "--device", str(device), file]
        try:
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=LONGEST_S).returncode
        except subprocess.TimeoutExpired:
            code = 124
        verdicts[file] = "passed" if code == 0 else f"failed ({code})"
    out = ROOT / ("benchmarks" if device.type == "cuda" else "build") / "RESULTS-GPU.md"
    command = [sys.executable, "-m", "benchmarks.on_gpu", "--device", str(device), "--out", str(out)]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    verdicts["benchmarks/on_gpu.py"] = "ran" if code == 0 else f"failed ({code})"
    for file, verdict in verdicts.items():
        print(f"{file}: {verdict}")
    print(f"all of it took {time.monotonic() - start:.0f} s on {device}")
    return int(any(verdict.startswith("failed") for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
