"""The end of a command: status 2 with one message for wrong input, status 130 or 143 for an
interruption.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from simulations.signals import end_at_once

_err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
_STOPPING = (signal.SIGTERM, signal.SIGINT)
_said = threading.Event()
_leaving = threading.Event()


def report_interruption(text: str) -> None:
    """Print how to continue an interrupted command."""
    _said.set()
    _err.print(text, style="yellow")


@contextmanager
def offer_to_continue(run: Path | None, engine: str) -> Iterator[Callable[[Path], None]]:
    """Print how to continue a run that an error or an interruption ends within the block.

    Args:
        run: folder of a run that is continued; None for a new run.
        engine: engine of the command.

    Yields:
        Function that takes the folder of a new run.
    """
    from fedlgm.errors import DivergedError, FedlgmError

    folder = run

    def set_folder(path: Path) -> None:
        nonlocal folder
        folder = path

    try:
        yield set_folder
    except DivergedError:  # a continued run would diverge again
        raise
    except BaseException as error:
        refused_again = isinstance(error, FedlgmError) and run is not None
        if folder is None:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                report_interruption("interrupted before the run had begun: nothing was written")
        elif folder.exists() and not refused_again:  # a refused run has left no folder
            how = "" if engine == "auto" else f" --engine {engine}"
            report_interruption(
                f"interrupted; continue with: fedlgm simulate --resume {folder}{how}"
            )
        raise


def report_as_json(error: BaseException, message: str) -> None:
    """Print an error as one JSON object on standard output, if the command line has `--json`.

    Args:
        error: the error, whose type is its kind.
        message: its message, which is also on standard error.
    """
    if "--json" in sys.argv[1:]:
        from simulations.runs import strict_json

        told = {"error": {"kind": type(error).__name__, "message": message, "status": 2}}
        sys.stdout.write(strict_json.dumps(told) + "\n")


class _Stopped(SystemExit):
    """Ends the command in order, with every `finally`; a signal that is swallowed is sent again.

    Python drops exceptions in `__del__` and in callbacks of weak references, and libraries drop
    them if they catch everything. The command would then continue as if it had not been stopped. An
    exception that is being handled is alive, so an exception that disappears before the command
    ends was dropped.
    """

    def __del__(self) -> None:
        if not _leaving.is_set():
            number = int(self.code or 0) - 128
            again = threading.Timer(
                0.05, signal.pthread_kill, (threading.main_thread().ident, number)
            )
            again.daemon = True
            again.start()


def _stop(number: int, frame: FrameType | None) -> None:
    # a handler of Ray's has set the alarm, which aborts the process after three seconds
    signal.alarm(0)
    # an exception could be dropped there, or abort compiled code
    if _importing(frame) and _childless():
        end_at_once(number, frame)
    raise _Stopped(128 + number)


def _importing(frame: FrameType | None) -> bool:
    """Whether the main thread imports a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _childless() -> bool:
    """Whether this process has no children, such as Ray's or a SuperLink's, which would be left
    behind.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
    """Print an unraisable exception; a signal is sent again instead."""
    if not isinstance(ignored.exc_value, _Stopped):
        sys.__unraisablehook__(ignored)


def ending(command: Callable[[], object]) -> None:
    """Run a command and end this process with the right message and status.

    Args:
        command: the command, which may raise anything.
    """
    from fedlgm.errors import FedlgmError, out_of_memory
    from fedlgm.files import explain_failure

    _said.clear()  # a process may run several commands, one after the other
    _leaving.clear()
    for number in _STOPPING:
        # Ctrl-C likewise: a KeyboardInterrupt in code that a library runs from a string would make
        # Python end itself by the signal, whatever status is asked for. If the parent process
        # ignores a signal for this process, it stays ignored.
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
        message = str(error) or "out of memory"
        if isinstance(error, OSError):
            message = explain_failure("the command failed", error)
        _err.print("error: ", style="bold red", end="")
        _err.print(message)
        report_as_json(error, message)
        _leave(2)


def _warner() -> Callable[..., None]:
    """Prints each warning once, because a recipe is checked in several places."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            _err.print(f"warning: {message}", style="yellow")

    return show


def _leave(status: int) -> NoReturn:
    """Exit, without Python's cleanup if Ray was left behind, because Ray's exit handler would wait
    for it.
    """
    _leaving.set()
    if status in {128 + number for number in _STOPPING} and not _said.is_set():
        report_interruption("interrupted")
    cluster = sys.modules.get("simulations.engines.cluster")
    if cluster is not None and cluster.left_behind.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _stopped_by(error: BaseException | None) -> int | None:
    """Status of the interruption behind an error, if any: compiled code turns interruptions into
    other errors.
    """
    while error is not None:
        if isinstance(error, SystemExit):
            return int(error.code or 0)
        if isinstance(error, KeyboardInterrupt):
            return 130
        error = error.__cause__ or error.__context__
    return None
