"""Memory is bounded: by neither the registered clients nor the cohort (the real figures are in
benchmarks/scale.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import json, resource, sys, tempfile
from pathlib import Path
from simulations import launch
from simulations.config import recipe
clients, cohort = int(sys.argv[1]), int(sys.argv[2])
overrides = [
    "data={{name = 'synthetic-100000', partition = 'dirichlet-large', alpha = 0.5}}",
    "model={{name = 'mlp', hidden = [1024, 512]}}",  # 64 blocks' sums are 280 MB
    "training={{epochs = 1, batch_size = 1000}}",
    f"federation.clients={{clients}}", f"federation.rate={{cohort / clients}}", "federation.rounds=2",
    "privacy.delta=1e-6", "privacy.accountant='rdp'", "run.evaluate_every=2",
]
with tempfile.TemporaryDirectory() as directory:
    result = launch.simulate(recipe.load("digits", overrides), engine="local", run_dir=Path(directory) / "run")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({{"peak": peak, "rounds": result["rounds"], "epsilon": result["epsilon"]}}))
""".replace("{{", "{").replace("}}", "}")


def _run(clients: int, cohort: int) -> dict[str, float]:
    command = [sys.executable, "-c", RUN, str(clients), str(cohort)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.slow
def test_memory_grows_neither_with_registered_clients_nor_with_the_cohort() -> None:
    small, registered, cohort = _run(500, 50), _run(50_000, 50), _run(50_000, 1000)
    assert registered["rounds"] == cohort["rounds"] == 2
    assert registered["peak"] < 1.2 * small["peak"]
    assert cohort["peak"] < 1.2 * small["peak"]
