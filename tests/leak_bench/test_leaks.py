"""`check` names planted leaks at the module that leaks, and is silent about the same models without them."""

from functools import cache

import pytest
import torch

import regard
from regard.watching.checks import Checked
from tests.families.architectures import tiny
from tests.leak_bench import families
from tests.leak_bench.leaks import LEAKS, Leak

pytest.importorskip("transformers")
AnyLeak = Leak | families.FamilyLeak
SAMPLE: list[AnyLeak] = [*LEAKS[:: len(LEAKS) // 12], *families.LEAKS[11::18]]


def verdict(leak: AnyLeak) -> tuple[Checked, float, bool]:
    model, given = leak.make(True)
    found = regard.check(model, given, causal=leak.causal)
    with torch.no_grad():
        return found, leak.differs(), any(one.path == leak.path for one in found.faults)


@cache
def of_twin(of: Leak | tuple[str, str]) -> Checked:
    model, given = of.make(False) if isinstance(of, Leak) else (tiny(*of), None)
    return regard.check(model, given, causal=of.causal if isinstance(of, Leak) else None)


def twin(leak: AnyLeak) -> Checked:
    return of_twin(leak if isinstance(leak, Leak) else leak.family)


@pytest.mark.parametrize("leak", SAMPLE, ids=[f"{one.mechanism}, {one.path}" for one in SAMPLE])
def test_a_leak_is_named_at_its_module_and_its_twin_is_clean(leak: AnyLeak) -> None:
    found, differs, is_named = verdict(leak)
    assert differs > 1e-4, "the leak changes nothing"
    assert is_named, str(found)
    assert not twin(leak), str(twin(leak))


@pytest.mark.slow
@pytest.mark.parametrize("leaks", [LEAKS, families.LEAKS], ids=["own", "families"])
def test_at_least_95_of_100_leaks_are_named_and_every_twin_is_clean(leaks: list[AnyLeak]) -> None:
    verdicts = [verdict(leak) for leak in leaks]
    assert len(verdicts) >= 150
    assert min(differs for _, differs, _ in verdicts) > 1e-4
    missed = [leak for leak, (_, _, is_named) in zip(leaks, verdicts, strict=True) if not is_named]
    assert len(missed) <= 0.05 * len(verdicts), missed
    assert not [str(twin(leak)) for leak in leaks if twin(leak).errors]
    assert sum(bool(twin(leak)) for leak in leaks) <= 2
