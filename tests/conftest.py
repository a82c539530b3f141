"""What the tests of a run have in common. Fixtures and what each test needs are in
`support/shared.py`."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

# NumPy and PyTorch read them at their import. The threads of OpenBLAS and OpenMP wait at full load,
# for 50 times as long as small problems take. On a busy machine a script of a few seconds took a
# minute with PyTorch's own threads.
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("FEDLGM_TEST_THREADS", "1"))
os.environ.setdefault("OMP_NUM_THREADS", os.environ["OPENBLAS_NUM_THREADS"])

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """One folder of kept calibrations for the tests of a run and their processes, empty at the
    start, gone at the end.

    A third of the suite's time went into the same few calibrations; a kept one is confirmed by the
    accountant. Whoever starts workers runs no tests: it does without PyTorch."""
    if not hasattr(config, "workerinput"):
        if "not slow" in config.option.markexpr and _has_memory_for_files():
            os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)
        kept = tempfile.TemporaryDirectory(prefix="fedlgm-tests-")
        os.environ["FEDLGM_CACHE"] = kept.name
        config.add_cleanup(kept.cleanup)
        if config.getoption("numprocesses", None):
            return
    gc.disable()  # until `pytest_collection_finish`
    config.pluginmanager.import_plugin("shared")


_MEMORY = "/dev/shm"


def _has_memory_for_files() -> bool:
    """Whether the temporary files of the usual tests fit into memory, where no test waits for the
    disk. Some tests run programs from them, which containers often forbid."""
    try:
        state = os.statvfs(_MEMORY)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize > 4 << 30 and not state.f_flag & os.ST_NOEXEC


LONG = (
    "fedlgm_nodes/deploy/test_deployment.py",
    "test_packaging.py",
    "simulations/engines/test_engines.py",
    "simulations/test_command_faults.py",
    "simulations/test_huggingface.py",
    "test_notebooks.py",
    "fedlgm_nodes/deploy/test_faults.py",
    "fedlgm_nodes/deploy/test_secure_sums.py",
    "simulations/engines/test_real_nodes.py",
    "fedlgm_nodes/deploy/test_own_data.py",
    "simulations/projects/test_new.py",
    "docs/test_commands.py",
    "simulations/test_distributed_trust.py",
    "simulations/test_ten_hospitals.py",
)
"""The longest files; last, one worker would run them while the other has nothing left to do."""


FORKING = ("tests/fedlgm_nodes/", "tests/simulations/engines/test_processes.py")
"""Files whose tests start many processes by forks of this one, which grows from test to test. A fork
takes 15 milliseconds for each 200 megabytes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of `LONG` first, then those of `FORKING`; the others stay in order."""
    root = Path(__file__).parent
    places = {root / name: place for place, name in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return places.get(item.path, len(LONG) + (not item.nodeid.startswith(FORKING)))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end; looking it through for garbage took a
    twentieth of the time, and looking through what is new at Python's usual thresholds a fortieth."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
