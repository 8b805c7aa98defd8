"""rxnmapper, a trained model made of one head: its matrices and its maps of atoms, by the page's script."""

import re

import pytest

from tests import ROOT

pytest.importorskip("rxnmapper", reason="rxnmapper is in an environment of its own: make consumers ONLY=rxnmapper")


def test_the_page_has_the_atoms_of_rxnmapper(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/uses/atoms.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "atoms.md", "exec"), names)
    assert len(names["smiles"]) == 6  # type: ignore[arg-type]
    assert "N 26 comes from N  9" in capsys.readouterr().out
