"""Nodes with real services: one for each test, and one that a module's tests leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.node.folder import NodeFolder
from tests.support.nodes import edit, hello, make_node, served


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeFolder]:
    with served(make_node(tmp_path / "node")) as folder:
        yield folder


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFolder]:
    """One node for tests after which it must be as before."""
    folder = make_node(tmp_path_factory.mktemp("lasting") / "node")
    edit(folder, "receive_seconds = 60.0", "receive_seconds = 2.0")
    with served(folder):
        yield folder
        assert hello(folder)["ok"]
