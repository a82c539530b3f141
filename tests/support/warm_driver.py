"""Loaded by the fork server of `test_faults`: a driver forked from it has everything imported and calibrated."""

from __future__ import annotations

import sklearn.datasets
import torch.utils.tensorboard

from simulations.config.assembly import Assembly
from tests.simulations.engines.test_faults import RECIPE

__all__ = ["sklearn", "torch"]

assembly = Assembly(RECIPE)
assembly.facts  # noqa: B018  (calibrates, and keeps the result)
assembly.partition  # noqa: B018
