"""Three nodes with real services, behind a link of the test's own, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.node_grids import NodeFederation


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[NodeFederation]:
    made = NodeFederation(tmp_path)
    yield made
    for process in made.processes:
        process.stop()
