"""Entry point of the `fedlgm` command. A stop during the import of its modules ends the process at
once.

Python drops an exception that is raised in a callback of a weak reference, and the import system
has such callbacks, so a KeyboardInterrupt could be lost there. Nothing has been written at that
point. `simulations.ending` takes over when the command begins.
"""

from __future__ import annotations

import signal

from simulations.signals import end_at_once


def main() -> None:
    """Run the command."""
    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_at_once)
    from simulations.cli import main as command

    command()
