"""A node's service that is killed: its ledger never shows less than was released."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.service.folder import NodeFolder
from tests.support import nodes
from tests.support.nodes import CRASHES, NodeProcess, ask, make_node, rows, served


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A node's files after its first release, and the answer of an undisturbed service to the
    second question."""
    folder = make_node(tmp_path_factory.mktemp("first") / "node")
    with served(folder):  # until the first release every start makes a new noise key
        ask(folder)
    copy = folder.path.with_name("copy")
    shutil.copytree(folder.path, copy)
    with served(folder):
        body = ask(folder, round=2)[1]
    return copy, body


def restored(undisturbed: tuple[Path, bytes], tmp_path: Path) -> NodeFolder:
    shutil.copytree(undisturbed[0], tmp_path / "node")
    nodes.write_data(tmp_path / "node.npz")
    return NodeFolder(tmp_path / "node")


@pytest.mark.parametrize("point", CRASHES)
def test_killed_at_every_step(undisturbed, tmp_path, point):
    folder = restored(undisturbed, tmp_path)
    process = NodeProcess(folder, CRASHES[point])
    with pytest.raises(RunError):
        ask(folder, round=2)
    process.wait()
    charged = 1 if point == "before the charge" else 2
    with served(folder):
        assert len(rows(folder)) == charged
        header, body = ask(folder, round=2)
        assert header["ok"]
        assert body == undisturbed[1]
    assert len(rows(folder)) == 2


@pytest.mark.slow
def test_killed_at_thirty_random_points(undisturbed, tmp_path):
    folder, chance = restored(undisturbed, tmp_path), random.Random(5)
    answers: dict[int, bytes] = {}
    for attempt in range(30):
        round_ = 2 + attempt // 3
        process = NodeProcess(folder, nodes.die_after(chance.uniform(0, 0.03)))
        try:
            header, body = ask(folder, round=round_)
            assert header["ok"]
            assert (
                answers.setdefault(round_, body) == body
            )  # what was answered before is answered again, bit by bit
        except RunError:
            pass
        process.kill()
        known = rows(folder)
        assert len({row.request for row in known}) == len(known)
        assert len(known) >= 1 + len(answers)
    assert len(rows(folder)) <= 11
    with served(folder):
        for round_, body in answers.items():
            header, again = ask(folder, round=round_)
            assert header.get("code") == "gone" or again == body
