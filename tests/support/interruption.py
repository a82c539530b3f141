"""Runs that a user's callback ends, and what their ledgers hold then."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.runs.folder import RunFolder


def take_ctrl_c() -> None:
    """Have processes that are started from now on take Ctrl-C as from a terminal.

    A shell that starts the tests in the background has it ignored. `conftest.py` undoes this after
    the test."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupted(Exception):
    """What a user's callback may raise."""


def interrupt_at(round_):
    def on_round(row):
        if row["round"] == round_:
            raise Interrupted

    return on_round


def interrupted(recipe, path: Path, round_: int) -> RunFolder:
    """A run that ends after a round."""
    with pytest.raises(Interrupted):
        launch.simulate(recipe, run_dir=path, progress=interrupt_at(round_))
    return RunFolder.open(path)


def charges(folder: RunFolder) -> list[int]:
    """Rounds of the ledger's rows."""
    with Ledger(folder.ledger_file) as ledger:
        return [charge.round for charge in ledger.charges()]
