"""The lists of faults fit the code as it is, and the tests that should see them exist."""

import re

from tests import ROOT
from tests.faults import plant

FAULTS = plant.listed()


def test_every_fault_fits_the_code() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {fault.file for fault in FAULTS}}
    counts = {fault.name: texts[fault.file].count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}, "these texts are not there exactly once"
    assert [fault.name for fault in FAULTS if fault.old == fault.new or not fault.why or not fault.tests] == []
    for fault in FAULTS:
        if fault.file.endswith(".py"):
            compile(texts[fault.file].replace(fault.old, fault.new), fault.name, "exec")
    assert len(FAULTS) > 80


def test_the_tests_that_should_see_a_fault_exist() -> None:
    for test in sorted({test for fault in FAULTS for test in fault.tests}):
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        wanted = rf"^def {re.escape(name.partition('[')[0])}\(" if name else r"^def test_|>>> "
        assert re.search(wanted, text, re.MULTILINE), test
