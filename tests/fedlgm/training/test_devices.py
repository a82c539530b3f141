"""Memory of a process that trains."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

STEPS = 2
ALLOCATIONS = """
import ctypes, resource, sys
import torch
from fedlgm.training.devices import keep_freed_memory
if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("not glibc")
def faults():
    for _ in range(2):  # the first allocates what the second may keep
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(int(sys.argv[1])):
            first = torch.ones(5_000_000)
            second = torch.ones(10_000_000)
            del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = faults()
keep_freed_memory()
print(usual, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_are_not_cleared_again_in_every_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS, str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not glibc" in done.stderr:
        pytest.skip("the allocator of another C library")
    pages = STEPS * 60_000_000 // resource.getpagesize()
    usual, kept = map(int, done.stdout.split())
    assert kept < pages / 100
    assert usual > pages / 2
