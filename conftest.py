"""For every test and documented example: shapes in signatures are checked, and random numbers are seeded."""

import gc
import os
import random
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Two processes of pytest-xdist share the machine: one thread each. Set before torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What torch compiles, this process compiles: a pool of processes that import torch first takes longer.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import jaxtyping

from tests.checked_shapes import checked_once

# Not the doors (functional, masks, shapes), whose own checks and messages are under test, nor methods
# that return `Self`, of which beartype wants to decorate the whole class. The estimator has checks of its own too.
CHECKED = {
    "call": ("scores.base", "scores.additive", "scores.custom", "normalizations", "positions"),
    "tasks.generation": ("protocol", "greedy_search", "beam", "sampling"),
}
# Nor where tests/core/test_compile.py starts a process of its own: torch.compile cannot trace these checks.
# Nor where beartype is not installed, as on a machine with a GPU that has only what `make gpu` needs.
if "REGARD_UNCHECKED_SHAPES" not in os.environ and find_spec("beartype") is not None:
    modules = [f"regard.{package}.{name}" for package, names in CHECKED.items() for name in names]
    vars(jaxtyping)["jaxtyped"] = checked_once(jaxtyping.jaxtyped)
    # numba compiles the loops of nn from their source, and cannot take what the hook adds to them.
    for room in ("nn", "models"):
        stems = [path.stem for path in (Path(__file__).parent / "src/regard" / room).glob("[!_]*.py")]
        modules += [f"regard.{room}.{name}" for name in stems if "loop" not in name and name != "kernel_regression"]
    jaxtyping.install_import_hook(modules, "beartype.beartype")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

hypothesis.settings.register_profile("regard", deadline=None, derandomize=True, max_examples=40)
# For planted faults: it stops at the first call that fails, without looking for the simplest one.
hypothesis.settings.register_profile(
    "first failure",
    hypothesis.settings.get_profile("regard"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("regard")

# Without Triton its programs cannot be imported. To import numba's is to compile it, where it is new for ten seconds:
# by each process at once, if that is done to look for examples. Neither has any.
COMPILED = ("maps/loop/row_loop", "tensors/vector_code")
collect_ignore = [f"src/regard/{name}.py" for name in COMPILED]
if not find_spec("triton"):
    of_triton = [f"maps/loop/triton_{name}" for name in ("rows", "columns", "scores")]
    collect_ignore += [f"src/regard/{name}.py" for name in (*of_triton, "call/scores/triton_additive")]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` runs the tests that have a device on it, and those of tests/gpu/test_on_device.py too."""
    parser.addoption("--device", default=None, help="cpu, cuda or cuda:N, for the tests that have a device")
    parser.addoption("--nightly", action="store_true", help="run the tests marked slow too")
    parser.addoption("--order", type=int, default=None, help="a seed, by which the files are run in another order")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of `--device`; the CPU without it."""
    return torch.device(request.config.getoption("--device") or "cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process a long stretch of files, and let an idle one take from another's.

    Handed out test by test, as pytest-xdist does unless told otherwise, what the tests of a file share is made by
    every process.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for examples in `src` alone: to look for them in a file of the tests is to import it."""
    found = yield
    in_tests = Path(__file__).parent / "tests" in file_path.parents
    return [one for one in found if type(one) is pytest.Module] if in_tests else found


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what the tests themselves are made of to no garbage collection, now or later.

    Eight thousand tests, torch and transformers are millions of objects that live to the end. Whoever asks for a
    collection, as the tests of what a watch holds do, waits for those that a test has made, and not for all. By
    itself Python collects after each 700 objects, and its oldest generation is large: here after 10,000.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests to `make nightly`, which begins with their files: begun last, one would run alone at the end."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    if config.getoption("--nightly"):
        files = {item.path for item in slow}
        items.sort(key=lambda item: item.path not in files)
    elif slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if (seed := config.getoption("--order")) is not None:
        place = {path: random.Random(f"{seed} {path.name}").random() for path in {item.path for item in items}}
        items.sort(key=lambda item: place[item.path])


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack for each kind of device
    before = _what_last_bits_depend_on()
    yield
    # Tests compare runs bit by bit: none may leave the process computing in another way for those after it.
    after = _what_last_bits_depend_on()
    torch.set_num_threads(before["threads"])  # `regard demo` may take one, for good
    assert after | {"threads": before["threads"]} == before


def _what_last_bits_depend_on() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "float32 products": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "dtype": torch.get_default_dtype(),
        "denormals": bool(torch.tensor(1e-40) * 1.0 != 0),
    }
