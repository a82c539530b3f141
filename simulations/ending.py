"""How a command ends: wrong input in one message and status 2, interruptions in status 130 or 143; nothing hangs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console

_err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_said = threading.Event()


def interrupted(text: str) -> None:
    """Say how an interrupted command can go on."""
    _said.set()
    _err.print(text, style="yellow")


def _stop(number: int, frame: Any) -> None:
    """End in order, with every `finally`."""
    signal.alarm(0)  # set by a handler of Ray's, which aborts the process after three seconds
    sys.exit(128 + number)


def _stop_again(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat a signal that came while Python ran what it lets nothing out of (`__del__`, callbacks of weak references).

    Python drops the exception there, and the command would go on as if nobody had stopped it.
    """
    status: Any = getattr(ignored.exc_value, "code", None)
    number = {128 + number: number for number in _STOPPING}.get(status)
    main_thread = threading.main_thread()
    if number is None or threading.current_thread() is not main_thread:
        sys.__unraisablehook__(ignored)
        return
    again = threading.Timer(0.05, signal.pthread_kill, (main_thread.ident, number))
    again.daemon = True
    again.start()


def ending(command: Callable[[], object]) -> None:
    """Run a command and end this process as its users expect.

    Args:
        command: the command, which may raise anything.
    """
    from fedlgm.errors import FedlgmError, out_of_memory

    for number in _STOPPING:
        # Ctrl-C likewise: a KeyboardInterrupt in code that a library runs from a string would make Python end itself by
        # the signal, whatever status is asked for. Who started us may have it ignored, and it stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _stop_again
    warnings.showwarning = _warner()
    try:
        command()
        _leave(0)
    except SystemExit as stop:
        _leave(int(stop.code or 0))
    except Exception as error:
        status = _stopped_by(error)
        if status is not None:
            _leave(status)
        if not isinstance(error, (FedlgmError, OSError)) and not out_of_memory(error):
            raise
        _err.print("error: ", style="bold red", end="")
        _err.print(str(error) or "out of memory")
        _leave(2)


def _warner() -> Callable[..., None]:
    """Prints each warning once, however often and wherever it is raised: a recipe is checked at several places."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            _err.print(f"warning: {message}", style="yellow")

    return show


def _leave(status: int) -> NoReturn:
    """Exit; without Python's own end where Ray was left behind, since its handler there would wait for it."""
    if status in {128 + number for number in _STOPPING} and not _said.is_set():
        interrupted("interrupted")
    cluster = sys.modules.get("simulations.engines.cluster")
    if cluster is not None and cluster.left_behind.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _stopped_by(error: BaseException | None) -> int | None:
    """Status of the interruption behind an error, if there is one: compiled code turns it into an error of its own."""
    while error is not None:
        if isinstance(error, SystemExit):
            return int(error.code or 0)
        if isinstance(error, KeyboardInterrupt):
            return 130
        error = error.__cause__ or error.__context__
    return None
