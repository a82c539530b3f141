"""The examples of the documentation run as they stand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedlgm.privacy.ledger import Ledger
from simulations.engines.flower import follow
from simulations.engines.superlink import private_superlink

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.slow
def test_an_existing_flower_app_becomes_private_by_one_mod_and_one_strategy(tmp_path: Path) -> None:
    app = EXAMPLES / "existing_flower_app"
    lines = [line for line in (app / "app.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
    log = tmp_path / "superlink.log"
    with private_superlink(log) as flwr:
        run_id = flwr.submit(
            app,
            "--federation-config",
            "num-supernodes=10 client-resources-num-cpus=1",
            "--run-config",
            f'folder="{tmp_path}"',
        )
        assert follow(flwr, run_id, log) == "finished:completed", flwr.log(run_id)
        assert "DEPRECATED" not in flwr.log(run_id) + log.read_text()
    state = torch.load(tmp_path / "model.pt")
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(state)
    x, y = load_digits(return_X_y=True)
    accuracy = np.mean(model(torch.tensor(x).float() / 16).argmax(1).numpy() == y)
    assert accuracy > 0.2
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.verify(contiguous=True)
        assert ledger.rounds() == 3
        assert 7 < ledger.epsilon(1e-2) <= 8
