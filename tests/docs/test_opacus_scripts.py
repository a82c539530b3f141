"""Scripts in the style of Opacus' examples, and what it takes to run them with fedlgm.

`tests/opacus_scripts` holds each script as an Opacus user has it, and beside it, as `_fedlgm.py`,
the same script with fedlgm."""

from __future__ import annotations

import difflib
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "opacus_scripts"
NAMES = ("digits_cnn", "digits_groupnorm", "names_lstm")
MOST = 10
"""Lines that a user writes; the loop over batches and what belongs to it are deleted."""


def lines_written(name: str) -> int:
    before, after = (
        (SCRIPTS / file).read_text(encoding="utf-8").splitlines()
        for file in (f"{name}.py", f"{name}_fedlgm.py")
    )
    differences = difflib.ndiff(before, after)
    return sum(line.startswith("+ ") and line != "+ " for line in differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_costs_the_same_epsilon_after_at_most_ten_written_lines(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lines_written(name) <= MOST
    monkeypatch.chdir(tmp_path)
    epsilons = []
    for file in (f"{name}.py", f"{name}_fedlgm.py"):
        torch.manual_seed(0)
        with warnings.catch_warnings():  # of Opacus' random generator and hooks
            warnings.simplefilter("ignore")
            runpy.run_path(str(SCRIPTS / file))
        told = re.search(r"epsilon (\S+) at", capsys.readouterr().out)
        assert told is not None
        epsilons.append(float(told[1]))
    assert epsilons[0] == pytest.approx(epsilons[1], abs=0.02)
