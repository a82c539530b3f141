"""A run's stored provenance."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import LedgerError
from simulations.runs.provenance_file import ProvenanceFile


def test_a_run_without_stored_layers_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    file.write_text('{"layers": {"fc1": 520}}')
    assert ProvenanceFile(file).layers() == {"fc1": 520}
    file.write_text("{}")
    with pytest.raises(LedgerError, match="does not name the layers"):
        ProvenanceFile(file).layers()
