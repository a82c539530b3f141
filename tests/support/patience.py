"""How long tests wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 600.0
"""Seconds after which a test gives up. No test that passes waits so long: a slow or busy machine
must not fail it."""


def wait_until(
    condition: Callable[[], object], what: str = "what the test waits for", every: float = 0.05
) -> None:
    """Return as soon as `condition` holds; fail after `LIMIT_S`."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {LIMIT_S:.0f} s"
        time.sleep(every)
