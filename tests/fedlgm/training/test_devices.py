"""Memory of a process that trains."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = 8
ALLOCATIONS = """
import ctypes, sys
import psutil, torch
from fedlgm.training.devices import keep_freed_memory, return_freed_memory
SIZES = (5_000_000, 10_000_000)  # glibc by itself keeps no block above 32 MiB, the second
if not hasattr(ctypes.CDLL(None), "mallopt"):
    sys.exit("not glibc")
def cleared_in_steps():
    '''Steps in which the system has cleared memory of freed blocks of ones before it came back.'''
    steps = 0
    for _ in range(int(sys.argv[1])):
        blocks = [torch.ones(size) for size in SIZES]
        del blocks
        blocks = [torch.empty(size) for size in SIZES]
        steps += not all(block.any() for block in blocks)
    return steps
before = cleared_in_steps()
keep_freed_memory()
print(before, cleared_in_steps())
blocks = [bytearray(100_000) for _ in range(2000)]
last = bytearray(100_000)  # above them in memory: glibc by itself returns nothing below it
del blocks
before = psutil.Process().memory_info().rss
return_freed_memory()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_blocks_are_not_cleared_again_in_every_step() -> None:
    """Page faults would show it too, but their number depends on the size of the pages."""
    found = subprocess.run(
        [sys.executable, "-c", ALLOCATIONS, str(STEPS)], capture_output=True, text=True, check=False
    )
    if "not glibc" in found.stderr:
        pytest.skip("the allocator of another C library")
    before, kept, returned = map(int, found.stdout.split())
    assert before >= STEPS * 3 / 4  # a power check: there is something to keep
    assert kept <= STEPS / 4  # while the heap grows to what a step needs
    assert returned > 100e6  # half of what was freed
