"""`check` names planted leaks at the module that leaks, and is silent about the same models without them."""

from functools import cache
from typing import NamedTuple

import pytest
import torch

import regard
from regard.watching.checks import Checked
from tests.leak_bench.leaks import LEAKS, Leak

LEAST = 0.95
SAMPLE = LEAKS[:: len(LEAKS) // 12]


class Verdict(NamedTuple):
    found: Checked
    of_twin: Checked
    differs: float
    is_named: bool


@cache
def verdict(leak: Leak) -> Verdict:
    (model, given), (twin, _) = leak.make(True), leak.make(False)
    longer = {"input_ids": torch.arange(1, 39).expand(2, -1)} if "border" in leak.mechanism else given
    with torch.no_grad():
        differs = float((model(**longer) - twin(**longer)).abs().max())
        if "length in the scale" in leak.mechanism:
            differs = float((model(given["input_ids"][:, :8]) - twin(given["input_ids"][:, :8])).abs().max())
    found, of_twin = (regard.check(one, given, causal=leak.causal) for one in (model, twin))
    return Verdict(found, of_twin, differs, any(one.path == leak.path for one in found.faults))


@pytest.mark.parametrize("leak", SAMPLE, ids=[f"{one.mechanism}, {one.kind}" for one in SAMPLE])
def test_a_leak_is_named_at_its_module_and_its_twin_is_clean(leak: Leak) -> None:
    found = verdict(leak)
    assert found.differs > 1e-4, "the leak changes nothing"
    assert found.is_named, str(found.found)
    assert not found.of_twin, str(found.of_twin)


@pytest.mark.slow
def test_at_least_95_of_100_leaks_are_named_and_every_twin_is_clean() -> None:
    verdicts = [verdict(leak) for leak in LEAKS]
    assert len(verdicts) >= 150
    assert min(one.differs for one in verdicts) > 1e-4
    missed = [(leak.mechanism, leak.kind) for leak in LEAKS if not verdict(leak).is_named]
    assert len(missed) <= (1 - LEAST) * len(verdicts), missed
    assert not [str(one.of_twin) for one in verdicts if one.of_twin.errors]
    assert sum(bool(one.of_twin) for one in verdicts) <= 2
