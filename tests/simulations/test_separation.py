"""Runs state whether the rows of a user's model are apart by construction, wherever an epsilon is
printed."""

import json

import pytest
import torch
from torch import nn

import simulations
from fedlgm.errors import Notice
from fedlgm.training.example_level.separation import TRIED_ROWS

SETTINGS = ["federation.rounds=2", "training.batch_size=32", "privacy.accountant=rdp"]


class Own(nn.Module):
    """A model of one's own, which runs under vmap."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x.flatten(1))))


class Branching(Own):
    """One that looks at values."""

    def forward(self, x):
        if bool(x.isnan().any()):
            raise ValueError("a row has gaps")
        return super().forward(x)


def test_a_model_that_runs_under_vmap_is_proven():
    result = simulations.simulate("dp-sgd-digits", model=Own, overrides=SETTINGS)
    assert result.guarantee.startswith("proven (example-level")


@pytest.mark.filterwarnings("ignore::fedlgm.errors.Notice")
def test_a_model_that_branches_on_values_is_conditional_everywhere(tmp_path):
    run = tmp_path / "run"
    result = simulations.simulate("dp-sgd-digits", model=Branching, overrides=SETTINGS, run_dir=run)
    assert result.guarantee.startswith("conditional (example-level")
    assert TRIED_ROWS in result.guarantee
    stored = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert TRIED_ROWS in stored["guarantee"]
    assert stored["guarantee_status"] == "conditional"
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert all(
        row["guarantee_status"] == "conditional" for row in rows if "guarantee_status" in row
    )


def test_the_reason_is_printed():
    with pytest.warns(Notice, match="the guarantee is conditional on the model treating the rows"):
        simulations.simulate("dp-sgd-digits", model=Branching, overrides=SETTINGS)
