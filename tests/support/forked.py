"""Commands and programs in a process forked from the test's: they start with everything imported,
or with all but some packages."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from simulations import cli
from tests.support.patience import LIMIT_S

_fork = multiprocessing.get_context("fork")
OWN = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab", "tests")


def run_afresh(program: str, *forgotten: str) -> tuple[int, str]:
    """Status and output of a program in a process that has not imported the library yet, nor these
    packages. Those that the library imports are there: to import them takes seconds."""

    def forget() -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] in {*OWN, *forgotten}:
                del sys.modules[name]

    def run() -> None:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})

    with tempfile.TemporaryDirectory() as folder:
        command = ForkedCommand(Path(folder) / "said", before=forget, main=run)
        status, out, err = command.end()
    return status, out + err


class ForkedCommand:
    """`fedlgm ARGUMENTS` in a process and a session of its own; what it prints goes into files.

    Args:
        folder: for those files; made here.
        arguments: of the command.
        before: called in the new process before the command; for limits and faults.
        main: the command, with its arguments in `sys.argv`.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        before: Callable[[], object] | None = None,
        main: Callable[[], object] = cli.main,
    ) -> None:
        folder.mkdir(parents=True)
        self._files = folder / "out", folder / "err"
        self._process = _fork.Process(
            target=_command, args=([*map(str, arguments)], *self._files, before, main)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return int(self._process.pid or 0)

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return as soon as `condition` holds, or the command has ended."""
        while self.running() and not condition():
            time.sleep(0.005)

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, standard output, standard error."""
        self._process.join(LIMIT_S)
        if self.running():
            self._process.kill()
            raise AssertionError(f"the command did not end within {LIMIT_S:.0f} s")
        out, err = (file.read_text() for file in self._files)
        return int(self._process.exitcode or 0), out, err


def _command(
    arguments: list[str],
    out: Path,
    err: Path,
    before: Callable[[], object] | None,
    main: Callable[[], object],
) -> None:
    os.setsid()
    # A collection in this process must not end objects of the test's own process, such as gRPC's,
    # whose threads do not exist here: five commands ended with a segmentation fault.
    gc.freeze()
    for number, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["fedlgm", *arguments]
    status = 1
    try:
        if before is not None:
            before()
        main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the test's own process is to be cleaned up here
