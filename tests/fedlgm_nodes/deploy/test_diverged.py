"""A deployed run that diverges says so to whoever started it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from diverging import install

from fedlgm.errors import DivergedError
from fedlgm_nodes.deploy import processes, submit
from fedlgm_nodes.deploy.create import create
from simulations.config import recipe as recipes

pytestmark = pytest.mark.slow


def test_the_operator_reads_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "modules", monkeypatch)  # for the server; nodes take no server step
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(
        tmp_path / "modules"
    )  # where the command is typed: the ServerApp looks there, too
    step = "federation.server_optimizer=my_diverging:Step"
    asked = recipes.load("nodes", ["model.hidden=[8]", "training.epochs=1", "run.seed=7", step])
    folder = create(tmp_path / "lab", 2, example=asked, test_seed=7, policy={"epsilon": 9.0})
    said: list[str] = []
    try:
        processes.up(folder)
        with pytest.raises(
            DivergedError, match=r"^training diverged in round 3: .*federation\.server_lr"
        ):
            submit.run(folder, asked, say=said.append)
    finally:
        processes.down(folder)
    assert [line.partition(":")[0] for line in said if line.startswith("round")] == [
        "round 1",
        "round 2",
    ]
    assert re.fullmatch(
        r"training diverged; norms .* last round: node\d \(\S+\), node\d \(\S+\)", said[-1]
    )
