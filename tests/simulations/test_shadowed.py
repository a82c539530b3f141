"""A user's folder with the name of one of our packages is named in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simulations

ROOT = Path(simulations.__file__).parents[1]


def imported(module: str, folder: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]; import {module}; print('imported')"
    environment = os.environ | {"PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder
    )


@pytest.mark.parametrize("kind", ["folder", "module"])
def test_a_folder_called_clients_is_named(kind: str, tmp_path: Path) -> None:
    if kind == "folder":
        (tmp_path / "clients").mkdir()
    mine = tmp_path / ("clients/__init__.py" if kind == "folder" else "clients.py")
    mine.write_text("mine = True\n")
    result = imported("simulations", tmp_path)
    assert result.returncode == 1
    assert f"ImportError: {mine} hides fedlgm's package 'clients'" in result.stderr
    assert (
        imported("fedlgm.privacy", tmp_path).stdout == "imported\n"
    )  # the core does without the other packages


def test_a_folder_of_data_alone_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    (tmp_path / "clients" / "one.csv").write_text("1\n")
    assert imported("simulations", tmp_path).stdout == "imported\n"
