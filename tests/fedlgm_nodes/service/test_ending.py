"""Orders to stop arrive whatever the main thread is doing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import LIMIT_S

SCRIPT = """
import os, signal, threading, time
from fedlgm_nodes.service.ending import on_order_to_stop

stop = threading.Event()
on_order_to_stop(stop.set)
with stop._cond:  # as between two instructions of `stop.wait()`
    os.kill(os.getpid(), signal.{})
    time.sleep(0.05)
stop.wait()
print("stopped")
"""


@pytest.mark.parametrize("order", ["SIGTERM", "SIGINT"])
def test_an_order_that_arrives_while_the_main_thread_holds_a_lock_is_not_lost(order):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(order)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S / 10,
    )
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
