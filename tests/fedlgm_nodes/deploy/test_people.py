"""One person at three real nodes: the run's model is that of a simulation in which the person is at
one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas
import pytest

import simulations
from fedlgm.errors import ConfigError, RunError
from fedlgm_nodes.deploy import own_data, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.policy import Data
from fedlgm_nodes.service import data as node_data
from simulations.config import recipe as recipes

SMALL = (
    "model.hidden=[8]", "federation.rounds=2", "federation.clients=3", "training.epochs=1",
    "privacy.epsilon=2.0", "privacy.max_participations=2", "run.seed=7",
)  # fmt: skip
FOR_PEOPLE = (*SMALL, "deployment.one_node_per_person=true")
SHARED = range(1000, 1010)
"""People with a row at every node; the second uses their data."""


def write(file: Path, people: list[int]) -> None:
    """A row of each person, with the person's own numbers."""
    rng = np.random.default_rng([sum(file.name.encode()), len(people)])
    x = rng.normal([50, 6], [20, 2], size=(len(people), 2)).round(2)
    table = pandas.DataFrame(x, columns=["age", "dose"])
    table["finding"] = np.where(x[:, 0] / 20 + x[:, 1] / 2 > 5.5, "malignant", "benign")
    table["person"] = [hashlib.sha256(f"salt {person}".encode()).hexdigest() for person in people]
    table.to_csv(file, index=False)


@pytest.mark.slow
def test_a_person_at_three_nodes_counts_at_one(tmp_path):
    files = [tmp_path / f"{name}.csv" for name in ("north", "south", "west")]
    for client, file in enumerate(files):
        write(file, [*range(100 * client, 100 * client + 40), *SHARED])
    write(tmp_path / "public.csv", list(range(60)))
    public = tmp_path / "public.csv"
    own = [
        own_data.describe(file, labels="finding", public=public, people="person") for file in files
    ]
    folder = create(tmp_path / "lab", 3, own=own, policy={"epsilon": 90.0}, test_seed=7)
    (tmp_path / "recipe.toml").write_text(own_data.recipe_text(own[0], public))
    recipe = recipes.load(str(tmp_path / "recipe.toml"), FOR_PEOPLE)
    try:
        shared = [hashlib.sha256(f"salt {person}".encode()).hexdigest() for person in SHARED]
        for name, listed in zip(("node0", "node1", "node2"), (shared, [], shared), strict=True):
            file = folder.node(name).service.path / own_data.ELSEWHERE
            file.write_text("\n".join(listed))
        processes.up(folder)
        deployed = submit.run(folder, recipe)
        processes.stop_node(folder, "node2")
        file.unlink()
        with pytest.raises(RunError, match=r"elsewhere\.txt: list there the pseudonyms"):
            processes.up(folder)  # an empty list is stated, not assumed
        policy = folder.node("node2").service.policy_file
        text = policy.read_text().splitlines()
        policy.write_text("\n".join(line for line in text if not line.startswith("people =")))
        with pytest.raises(RunError, match="count each person at one node"):
            processes.up(folder)
    finally:
        processes.down(folder)
    simulated = simulations.simulate(
        "nodes", data=_kept_rows(tmp_path, own, files), overrides=FOR_PEOPLE, run_dir=tmp_path / "s"
    )
    assert deployed["model_sha256"] == simulated["model_sha256"]
    assert deployed["epsilon"] == simulated.epsilon <= 2.0
    assert "conditional on each person counting at one node" in deployed["guarantee"]
    with pytest.raises(ConfigError, match="replace-one"):
        submit.run(folder, recipe.with_values(privacy={"trust": "central"}))


def _kept_rows(folder: Path, own: list[dict[str, object]], files: list[Path]) -> dict[str, object]:
    """What a simulation gets: the shared people's rows at the second node alone."""
    xs, ys, clients, start = [], [], [], 0
    for client, (values, file) in enumerate(zip(own, files, strict=True)):
        frame = pandas.read_csv(file, dtype={"person": str}).drop(columns="person")
        kept = folder / f"kept{client}.csv"
        (frame if client == 1 else frame[:40]).to_csv(kept, index=False)
        section = {key: value for key, value in values.items() if key in Data.model_fields}
        plain = section | {"name": "d", "path": str(kept), "people": None}
        found = node_data.read(Data.model_validate(plain), folder)
        xs.append(found.x.numpy())  # type: ignore[union-attr]
        ys.append(found.y.numpy())
        clients.append(np.arange(start, start + len(found)))
        start += len(found)
    x, y = np.concatenate(xs), np.concatenate(ys)
    return {"train": (x, y), "test": (x[:20], y[:20]), "clients": clients}
