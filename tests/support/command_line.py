"""The command line in this process, and a finished run."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Iterator

import pytest
from federations import tiny_values

from simulations import cli, launch
from simulations.config import recipe as recipes


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run `fedlgm ...` in this process, in an empty folder: status, standard output, standard
    error."""
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


@pytest.fixture(scope="module")
def one_ray() -> Iterator[None]:
    """Ray for all runs of a module: how it is started and left is tested with the engines."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def _finished_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    launch.simulate(recipes.Recipe.model_validate(tiny_values()), run_dir=path)
    return path


@pytest.fixture
def finished(_finished_once, tmp_path):
    """A finished run of the tiny recipe, the test's own copy."""
    shutil.copytree(_finished_once, tmp_path / "run")
    return tmp_path / "run"
