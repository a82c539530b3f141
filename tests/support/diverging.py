"""Server steps whose models become NaN or infinite, as a module that a recipe can name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_SOURCE = """
import torch


class Step:
    '''Plain averaging of two rounds; the third divides by zero.'''

    def __init__(self, lr, momentum):
        self.made = 0

    def step(self, model, mean_update):
        self.made += 1
        return model + mean_update if self.made < 3 else model / torch.zeros(())

    def state(self):
        return {"made": torch.tensor([float(self.made)])}

    def restore(self, model, state):
        self.made = int(state["made"])


class AtOnce:
    def __init__(self, lr, momentum):
        pass

    def step(self, model, mean_update):
        return model + float("nan")
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `my_diverging` found by this process, and by those that it starts."""
    folder.mkdir()
    (folder / "my_diverging.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "my_diverging", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
