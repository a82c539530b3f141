"""The packages are light: they load no framework, and an accountant only for figures."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, time
start = time.process_time()
import fedlgm.check, fedlgm.privacy
names = [fedlgm.check.Settings, fedlgm.check.check, fedlgm.check.opacus, fedlgm.check.flower]
names += [fedlgm.check.tensorflow_privacy, fedlgm.check.nvflare, fedlgm.check.read_script]
seconds = time.process_time() - start
heavy = {"torch", "flwr", "ray", "opacus", "tensorflow", "pandas", "dp_accounting", "scipy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
print(seconds)
settings = {"noise_multiplier": 1.0, "sampler": "all", "steps": 1, "delta": 1e-5}
print(fedlgm.check.check(fedlgm.check.Settings(**settings)).epsilon)
assert not {"torch", "flwr", "ray", "opacus"} & set(sys.modules)
"""


def test_no_framework_is_loaded_and_the_import_takes_little_time() -> None:
    """A second start is measured only if the first one was slow, as on a busy machine."""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        )
        seconds, epsilon = map(float, done.stdout.split())
        assert abs(epsilon - 4.377) < 1e-3
        if seconds < 0.5:
            return
    raise AssertionError(f"the import took {seconds} s of a core")
