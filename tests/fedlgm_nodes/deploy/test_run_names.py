"""Names of a recipe's runs: `register` and `run` agree on them, and no number is used for two
runs."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import recipe_for_nodes
from fedlgm_nodes.deploy.signer import Signer
from simulations.config import recipe as recipes

RECIPE = recipe_for_nodes(recipes.load("nodes", ["model.hidden=[8]"]), 3)


@pytest.fixture
def folder(tmp_path):
    return create(tmp_path / "lab", 3)


def begun(folder: DeploymentFolder, fresh: bool = False) -> int:
    """Number of the run that `deploy run` begins or continues."""
    return submit.number(submit._folder(folder, RECIPE, fresh).path.name)


def register(folder: DeploymentFolder, fresh: bool = False) -> int:
    return submit.number(submit.register(folder, RECIPE, fresh=fresh))


@pytest.fixture
def two_users(folder, monkeypatch):
    """The deployment, whose signer belongs to another user than the server's; its socket is
    answered here."""
    signer = Signer(folder.signer)

    def access(path: object, mode: int) -> bool:
        return path != folder.signer.runs

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr(submit, "unused_at", lambda socket, stem: signer.unused_runs(stem))
    yield folder
    signer.close()


def test_a_run_begins_as_it_was_registered(two_users):
    assert register(two_users) == begun(two_users) == 1
    assert begun(two_users) == 1
    assert register(two_users, fresh=True) == begun(two_users, fresh=True) == 2
    assert begun(two_users) == 2


def test_a_run_that_was_refused_leaves_its_registration_to_the_next(two_users):
    register(two_users)
    shutil.rmtree(two_users.runs / submit._folder(two_users, RECIPE, False).path.name)
    assert begun(two_users) == 1


def test_the_newest_of_several_registered_runs_begins(two_users):
    """After a refusal of nodes its operator may register the run again."""
    assert (register(two_users), register(two_users, fresh=True)) == (1, 2)
    assert begun(two_users, fresh=True) == 2


def test_a_run_that_is_not_registered_does_not_begin(two_users):
    for fresh in (False, True):
        with pytest.raises(
            RunError, match=r"is not registered; .* fedlgm deploy register RECIPE DIR --fresh"
        ):
            begun(two_users, fresh)
    register(two_users)
    begun(two_users)
    with pytest.raises(RunError, match="is not registered"):
        begun(two_users, fresh=True)


def test_a_registration_is_not_used_for_a_second_run(two_users):
    """The folder of the first is gone, but the signer has signed its questions for other models."""
    name = submit.register(two_users, RECIPE)
    with Signer(two_users.signer)._signed as signed:
        signed.execute("INSERT INTO signed VALUES (?, 1, 0, 'x')", (name,))
    with pytest.raises(RunError, match="is not registered"):
        begun(two_users)


def test_a_number_is_not_used_again_after_its_folder_is_gone(folder):
    assert begun(folder) == 1
    (folder.signer.runs / f"{submit._folder(folder, RECIPE, False).path.name}.json").write_text(
        json.dumps({})
    )
    assert begun(folder, fresh=True) == 2
    shutil.rmtree(submit._folder(folder, RECIPE, False).path)
    shutil.rmtree(submit._folder(folder, RECIPE, False).path)
    assert begun(folder, fresh=True) == 2


def test_the_newest_run_is_that_with_the_largest_number(folder):
    stem = submit._stem(RECIPE)
    for number in ("999", "1000"):
        (folder.runs / f"{stem}-{number}").mkdir()
        (folder.runs / f"{stem}-{number}" / "recipe.toml").write_text(RECIPE.to_toml())
    assert begun(folder) == 1000
    assert begun(folder, fresh=True) == 1001
