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
_leaving = threading.Event()


def interrupted(text: str) -> None:
    """Say how an interrupted command can go on."""
    _said.set()
    _err.print(text, style="yellow")


class _Stopped(SystemExit):
    """Ends the command in order, with every `finally`; a signal that something swallows is sent again.

    Python drops exceptions in `__del__` and in callbacks of weak references, and libraries drop them where they catch
    everything. The command would go on as if nobody had stopped it. An exception that is being handled is alive, so one
    that disappears before the command leaves was dropped.
    """

    def __del__(self) -> None:
        if not _leaving.is_set():
            number = int(self.code or 0) - 128
            again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, number))
            again.daemon = True
            again.start()


def _stop(number: int, frame: Any) -> None:
    signal.alarm(0)  # set by a handler of Ray's, which aborts the process after three seconds
    raise _Stopped(128 + number)


def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
    """Print what Python lets nothing out of, but for a signal, which is sent again."""
    if not isinstance(ignored.exc_value, _Stopped):
        sys.__unraisablehook__(ignored)


def ending(command: Callable[[], object]) -> None:
    """Run a command and end this process as its users expect.

    Args:
        command: the command, which may raise anything.
    """
    from fedlgm.errors import FedlgmError, out_of_memory

    _said.clear()  # a process may run several commands, one after the other
    _leaving.clear()
    for number in _STOPPING:
        # Ctrl-C likewise: a KeyboardInterrupt in code that a library runs from a string would make Python end itself by
        # the signal, whatever status is asked for. Who started us may have it ignored, and it stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _unraisable
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
    _leaving.set()
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
