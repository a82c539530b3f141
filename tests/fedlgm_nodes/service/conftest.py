"""Nodes with real services: one for each test, and one that a module's tests leave as it was."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlgm_nodes.service.folder import NodeFolder
from tests.support.nodes import edit, hello, make_node, served
from tests.support.secure_nodes import NODES, SecureFederation, Served, make_nodes


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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nodes of secure sums that nobody has asked."""
    path = tmp_path_factory.mktemp("made")
    make_nodes(path)
    return path


@pytest.fixture
def federation(made: Path, tmp_path: Path) -> Iterator[SecureFederation]:
    """A server over copies of these nodes."""
    shutil.copytree(made, tmp_path / "n")
    served = Served([NodeFolder(tmp_path / "n" / f"n{client}") for client in range(NODES)])
    yield SecureFederation(tmp_path, served)
    served.close()
