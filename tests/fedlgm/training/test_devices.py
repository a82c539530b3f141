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
def steps():
    for _ in range(int(sys.argv[1])):
        first = torch.ones(5_000_000)
        second = torch.ones(10_000_000)
        del first, second
def faults():
    steps()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
as_it_was = faults()
keep_freed_memory()
print(as_it_was, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_are_not_cleared_again_in_every_step() -> None:
    found = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS, str(STEPS)], capture_output=True, text=True, check=False
    )
    if "not glibc" in found.stderr:
        pytest.skip("the allocator of another C library")
    as_it_was, kept = map(int, found.stdout.split())
    pages = STEPS * 60_000_000 // resource.getpagesize()
    assert kept < pages / 100
    assert as_it_was > pages / 2
