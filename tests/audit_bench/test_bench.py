"""The audit names planted faults and is silent about clean models, told nothing; the page shows how many."""

import pytest

pytest.importorskip("transformers")
from tests.audit_bench import table
from tests.audit_bench.clean import CLEAN
from tests.audit_bench.faults import Fault
from tests.audit_bench.table import FAULTS, clean, verdict

# transformers and torch say what they have deprecated; nothing of it is ours.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
WITH_WARNINGS = 2
"""The most clean runs in 60 that may have a warning."""


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{one.kind}: {one.name}" for one in FAULTS])
def test_a_fault_is_named_and_its_twin_is_clean(fault: Fault) -> None:
    found = verdict(fault)
    assert found.differs > 1e-4, "the fault changes nothing"
    assert found.is_named, str(found.found)
    assert not found.of_twin, str(found.of_twin)


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_model_has_no_fault(name: str) -> None:
    assert not clean(name).errors, str(clean(name))


def test_the_page_shows_the_table() -> None:
    verdicts, runs = [verdict(one) for one in FAULTS], [clean(name) for name in CLEAN]
    assert sum(bool(one.warnings) for one in runs) * 60 <= WITH_WARNINGS * len(runs)
    text = table.PAGE.read_text(encoding="utf-8")
    shown = text.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    assert shown == table.table(verdicts, runs), "python -m tests.audit_bench.table writes it"
