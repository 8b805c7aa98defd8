"""The instructions that the compiled loops may use."""

import logging
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.tensors import vector_code


def test_numba_may_be_told_another_processor() -> None:
    """It may not know how to pack numbers together: LLVM would end the process."""
    told = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    asked = "from regard.tensors import vector_code as code; print(code.IS_FOR_HOST, code.HAS_COMPRESS)"
    done = subprocess.run([sys.executable, "-c", asked], env={**os.environ, **told}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr
    assert ("NUMBA_CPU_NAME" not in os.environ) == vector_code.IS_FOR_HOST


SLOW = '''
import time
from numba import types
from numba.extending import intrinsic
from regard.tensors.vector_code import compiled_function

def take_long(_typing):
    """Stands for a long compilation: numba asks for the types while it compiles."""
    time.sleep(0.3)
    ended.append(time.time())
    return types.int64(), lambda context, builder, signature, arguments: context.get_constant(types.int64, 1)

ended = []
long = intrinsic(take_long)

@compiled_function(types.int64(types.int64))
def more(x):
    return x + long()
'''


def test_a_compilation_is_told_of_before_it_takes_long_and_its_code_is_kept(
    tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    path = tmp_path / "slow_loop.py"
    path.write_text(SLOW)
    told: list[list[logging.LogRecord]] = []
    for first in (True, False):
        vector_code._say.cache_clear()
        logged.clear()
        spec = spec_from_file_location("slow_loop", path)
        module = module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)
        assert module.more.ctypes(1) == 2
        assert bool(module.ended) is first, "the second process compiles again"
        told.append([one for one in logged if one.name == "regard"])
        if first:
            assert told[0][0].created < module.ended[0] - 0.25, "it is told of when it is over"
    ((one,), none) = told
    assert none == []
    kept = f"regard compiles slow_loop for this processor, about ten seconds, once: the code is kept in {tmp_path}"
    assert one.getMessage().startswith(kept)


def test_without_a_folder_the_line_says_that_nothing_is_kept(logged: list[logging.LogRecord]) -> None:
    vector_code._say("a_loop", None)
    assert [one.getMessage() for one in logged] == [
        "regard compiles a_loop for this processor, about ten seconds, in each process: no folder for it can be written"
    ]
