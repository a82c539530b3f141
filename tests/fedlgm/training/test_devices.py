"""Memory of a process that trains."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

STEPS = 4
ALLOCATIONS = """
import ctypes, resource, sys
import torch
from fedlgm.training.devices import keep_freed_memory
if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("not glibc")
if sys.argv[1] == "kept":
    keep_freed_memory()
def steps():
    for _ in range(int(sys.argv[2])):
        first = torch.ones(5_000_000)
        second = torch.ones(10_000_000)
        del first, second
steps()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(kept: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS, kept, str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not glibc" in found.stderr:
        pytest.skip("the allocator of another C library")
    return int(found.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_are_not_cleared_again_in_every_step() -> None:
    pages = STEPS * 60_000_000 // resource.getpagesize()
    assert _faults("kept") < pages / 100
    assert _faults("as it was") > pages / 2
