"""What a run from Python prints while it runs, and after Ctrl-C."""

from __future__ import annotations

import io
import sys
import time
import traceback

import pytest
from federations import tiny_values

import simulations
from simulations import live
from simulations.config import recipe as recipes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tiny_recipe():
    return recipes.Recipe.model_validate(tiny_values())


def test_a_terminal_has_one_line_that_is_overwritten_and_removed(
    tiny_recipe, monkeypatch, tmp_path
):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    simulations.simulate(tiny_recipe, run_dir=tmp_path / "run")
    rounds = tiny_recipe.federation.rounds
    assert f"round {rounds} of {rounds}" in screen.getvalue()
    assert "epsilon" in screen.getvalue()
    assert "\n" not in screen.getvalue()
    assert screen.getvalue().rpartition("\r")[0].endswith(" " * 79)


def test_a_process_that_has_imported_a_kernel_is_no_notebook(tiny_recipe, monkeypatch, tmp_path):
    """Its display has no handle: the run ended in an AttributeError, and a study waited for the
    lock of its line for ever."""
    import ipykernel  # noqa: F401
    import IPython

    assert IPython.get_ipython() is None
    assert live.live_stream() is None
    assert simulations.simulate(tiny_recipe, run_dir=tmp_path / "run").epsilon > 0
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    monkeypatch.setattr(live, "_Cell", io.StringIO)
    assert isinstance(live.live_stream(), io.StringIO)


def test_a_log_has_a_plain_line_every_30_seconds_and_quiet_runs_none(
    tiny_recipe, monkeypatch, capsys, tmp_path
):
    simulations.simulate(tiny_recipe, run_dir=tmp_path / "short")
    assert capsys.readouterr().err == ""
    seconds = iter(range(0, 10_000, 20))
    monkeypatch.setattr(live.time, "monotonic", lambda: float(next(seconds)))
    with live.progress_line(tiny_recipe) as on_round:
        for number in range(1, 5):
            on_round({"round": number})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "s left" in lines[0]
    monkeypatch.setattr(live.time, "monotonic", time.perf_counter)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    simulations.simulate(tiny_recipe, run_dir=tmp_path / "quiet", progress=False)
    assert screen.getvalue() == ""


def test_ctrl_c_ends_in_a_short_traceback_whose_last_line_says_how_to_continue(
    tiny_recipe, tmp_path
):
    def stop(row: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        simulations.simulate(tiny_recipe, run_dir=tmp_path / "run", progress=stop)
    text = "".join(traceback.format_exception(stopped.value))
    assert text.strip().splitlines()[-1].startswith("continue the run with simulations.resume(")
    assert text.count('File "') <= 6
