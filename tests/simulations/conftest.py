"""The command line in this process."""

from __future__ import annotations

import sys
import warnings

import pytest

from simulations import cli


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run `fedlgm ...` in this process, in an empty folder: status, standard output, standard error."""
    here = tmp_path / "cwd"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # the command replaces it

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedlgm", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture
def finished(run, tiny_file, tmp_path):
    """A finished run."""
    status, _, err = run("simulate", tiny_file, "--engine", "local", "--run-dir", tmp_path / "run", "--json")
    assert status == 0, err
    return tmp_path / "run"
