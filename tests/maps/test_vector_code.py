"""The instructions that the compiled loops may use."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.tensors import vector_code


def test_numba_may_be_told_another_processor() -> None:
    """It may not know how to pack numbers together: LLVM would end the process."""
    told = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    asked = "from regard.tensors import vector_code as code; print(code.IS_FOR_HOST, code.HAS_COMPRESS)"
    done = subprocess.run([sys.executable, "-c", asked], env={**os.environ, **told}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr
    assert vector_code.IS_FOR_HOST
