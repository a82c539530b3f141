"""The GPU benchmark runs as one command on a machine that has little more than torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import Attempts
from tests.support.forked import run_afresh

CODE = """
import importlib.abc, json, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"flwr", "ray", "opacus", "dp_accounting", "pydantic", "torchvision", "datasets"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
import torch
torch.set_num_threads(1)
import benchmarks.gpu
from benchmarks.gpu_parts import rounds

cpu = torch.device("cpu")
checks, measured = rounds.check(cpu, rounds.TINY), rounds.measure(cpu, rounds.TINY)
assert all(checks.values()), checks
assert measured["summary"]["parameters"] == 26010
assert [row.get("width") for row in measured["rows"][:3]] == [None, 2, 4]
assert measured["rows"][3]["convolutions"] == "products"
assert all(row["clients_per_s"] > 0 and not row["warnings"] for row in measured["rows"])
json.dumps(measured)
"""


@pytest.mark.slow
def test_a_private_round_is_measured_with_torch_numpy_and_scipy_alone():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_part_that_fails_is_named_and_costs_no_other_its_figures():
    attempt = Attempts()
    results = attempt.checks(
        {"broken": (int, "x"), "wrong": (dict, {"holds": True, "does not": False})}
    )
    assert results == {"broken": {}, "wrong": {"holds": True, "does not": False}}
    assert attempt("times", dict, {"ms": 1.0}) == {"ms": 1.0}
    broken, wrong = attempt.failures
    assert broken.startswith("broken: ValueError")
    assert wrong == "wrong: does not"


ADAPTERS = """
import torch
from benchmarks.gpu_parts import adapters

measured = adapters.measure(torch.device("cpu"), adapters.TINY)
assert measured["private_over_bare"] > 0
assert measured["trained"] == 512 < measured["parameters"]
steps = adapters.measure_steps(torch.device("cpu"), adapters.TINY, turns=2)
assert steps["private_over_plain"] > 0
assert len(steps["all_seconds"]["private"]) == len(steps["all_seconds"]["plain"]) == 2
"""


@pytest.mark.slow
def test_adapters_of_a_language_model_train_privately_beside_a_bare_loop() -> None:
    """In a process of its own: its checkpoints start threads of autograd, and PyTorch refuses to
    train in forks of a process that has them."""
    status, said = run_afresh(ADAPTERS, "benchmarks")
    assert status == 0, said
