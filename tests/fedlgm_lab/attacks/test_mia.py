from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fedlgm_lab.attacks.mia import attack_outputs, output_scores


def test_output_scores_known_answers():
    p, y = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([1])
    found = {
        name: float(score[0]) for name, score in output_scores(nn.Identity(), p.log(), y).items()
    }
    assert found["loss"] == pytest.approx(math.log(0.2), rel=1e-6)
    assert found["confidence"] == pytest.approx(math.log(0.7), rel=1e-6)
    assert found["entropy"] == pytest.approx(
        0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1), rel=1e-6
    )
    # Song and Mittal: Mentr = -(1 - p_y) ln p_y - sum over the others of p ln(1 - p); the score is
    # its negative.
    modified = 0.8 * math.log(0.2) + 0.7 * math.log(0.3) + 0.1 * math.log(0.9)
    assert found["modified-entropy"] == pytest.approx(modified, rel=1e-6)


def test_sure_outputs_do_not_overflow():
    scores = output_scores(nn.Identity(), torch.tensor([[1000.0, 0.0]]), torch.tensor([1]))
    assert all(np.isfinite(values).all() for values in scores.values())


class _Remembers(nn.Module):
    """Its second layer marks the inputs it was trained on."""

    def __init__(self, members: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self._members = members

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = (x[:, None] == self._members[None]).all(-1).any(1).float()
        return self.second(self.first(x) * 0 + 3 * own[:, None])


def test_output_attack_on_a_model_that_remembers():
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    module, y = _Remembers(x[:50]), torch.zeros(50, dtype=torch.int64)
    results = attack_outputs(module, (x[:50], y), (x[50:], y))
    assert results["loss"].auc in (0.0, 1.0)
