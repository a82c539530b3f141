"""What the server of a deployment writes down of its nodes."""

from __future__ import annotations

import json
import stat

from simulations.config import recipe as recipes
from simulations.deploy.server_entry import REPORT, TOLD, NodesRecord
from simulations.runs.folder import RunFolder
from strategies.node.enrolment import Enrolment
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


def test_an_answer_that_breaks_a_rule_is_named_with_its_reason(tmp_path, capsys):
    """To the node's service it looks answered: only the server's checks of the plan reject it."""
    folder = RunFolder.create(tmp_path / "run", recipes.load("nodes"))
    nodes = [
        {"client": c, "name": f"node{c}", "flower_key": f"{c}" * 64, "service_key": f"{c + 5}" * 64} for c in (0, 1)
    ]
    enrolment = Enrolment.model_validate({"node": nodes})
    failures = [
        {"kind": "rejected", "node": 3, "client": 1, "reason": "its values are not finite"},
        {"kind": "error", "node": 2, "client": 0, "reason": "node0: no answer"},  # named when its answer did not come
    ]
    record = NodesRecord(folder)
    record.counted({"round": 4, "cohort": 2, "seconds": 0.5, "failures": failures}, enrolment)
    line = capsys.readouterr().out
    assert line.startswith("round 4: 2 nodes asked, 0.50 s")
    assert "node1 counts as zero, its answer was rejected: its values are not finite" in line
    assert "node0" not in line
    (row,) = (folder.path / "private" / REPORT).read_text().splitlines()
    assert json.loads(row) == {"round": 4, "rejected": {"node1": "its values are not finite"}}
