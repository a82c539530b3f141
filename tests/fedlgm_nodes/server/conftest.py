"""Nodes with real services, behind a link of the test's own, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlgm_nodes.protocol import frames
from tests.support.node_grids import NodeFederation
from tests.support.secure_nodes import SecureFederation, Served, make_nodes


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[NodeFederation]:
    """Three nodes and their server."""
    made = NodeFederation(tmp_path)
    yield made
    for process in made.processes:
        process.stop()


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecureFederation]:
    """Five nodes that answer only in secure sums, and their server."""
    served = Served(make_nodes(tmp_path))
    monkeypatch.setattr(frames, "exchange", served.exchange)
    yield SecureFederation(tmp_path, served)
    served.close()
