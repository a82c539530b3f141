"""What the server of a deployment writes down of its nodes."""

from __future__ import annotations

import json
import stat

from simulations.config import recipe as recipes
from simulations.deploy.server_entry import REPORT, TOLD, NodesRecord
from simulations.runs.folder import RunFolder
from strategies.node.round import RoundReport


def test_who_took_part_is_the_operators_alone_to_read(tmp_path):
    """Secret sampling needs it, and a folder that is shared without `private/` must not tell."""
    folder = RunFolder.create(tmp_path / "run", recipes.load("nodes"))
    record = NodesRecord(folder)
    record.say("round 1: node7 counts as zero: no answer")
    record.round(RoundReport(1, ["node3"], {"node7": "no answer"}, 0, 1.5))
    told, report = (folder.path / "private" / name for name in (TOLD, REPORT))
    assert "node7" in told.read_text()
    assert json.loads(report.read_text())["answered"] == ["node3"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in (told, report)} == {0o600}
    for path in folder.path.rglob("*"):
        if path.is_file() and path.parent != told.parent:
            assert b"node3" not in path.read_bytes()
            assert b"node7" not in path.read_bytes()
