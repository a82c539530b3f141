"""Signals that order a process to stop, for processes that run until they receive one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

ORDERS = frozenset({signal.SIGTERM, signal.SIGINT})


def on_order_to_stop(call: Callable[[], None]) -> None:
    """Arrange that `call` is called once, in another thread, after SIGTERM or SIGINT. This must be
    called in the main thread.

    A signal handler runs between two instructions of the main thread. If `call` ran in the handler
    and the main thread held a lock that `call` needs, such as the lock of an event, the process
    would never end.
    """
    orders, arrived = os.pipe()
    os.set_blocking(arrived, False)
    signal.set_wakeup_fd(arrived)
    for number in ORDERS:
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while os.read(orders, 1)[0] not in ORDERS:
            pass
        call()

    threading.Thread(target=wait, name="order to stop", daemon=True).start()
