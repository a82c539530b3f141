"""A run that real nodes' server refuses leaves neither a folder nor a registration."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import RunError
from simulations.config import recipe as recipes
from simulations.deploy import submit
from simulations.deploy.create import create
from simulations.deploy.flower_cli import Flower


def test_a_refusal_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Flower):
        def healthy(self) -> bool:
            return True

        def submit(self, app: Path, *options: str) -> str:
            raise RunError("the SuperLink refuses it")

    monkeypatch.setattr(submit, "Flower", Refusing)
    folder = create(tmp_path / "lab", 2, example=recipes.load("nodes", ["model.hidden=[8]"]))
    with pytest.raises(RunError, match="refuses"):
        submit.run(folder, recipes.load("nodes", ["model.hidden=[8]"]))
    assert list(folder.runs.iterdir()) == list(folder.signer.runs.iterdir()) == []
