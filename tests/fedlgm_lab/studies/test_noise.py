"""Compared runs never share noise: from two models released with the same noise the private sum
could be computed."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from compared import shown, summary_of

import simulations
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy.gaussian import gaussian_epsilon
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.studies import joint, running
from fedlgm_lab.studies.jobs import Job, jobs
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder

# One round in which everybody takes part, and no batch order: every run sums up the same updates,
# uncut, under noise that hides them.
SMALL = [
    "federation.clients=20",
    "federation.rounds=1",
    "federation.rate=1.0",
    "training.epochs=1",
    "model.hidden=[8]",
    "training.batch_size=2000",
    "training.lr=2.0",
    "mechanism.bound=100.0",
    "privacy.accountant=rdp",
]
METHODS = ("gaussian", "snr-consistent")
BUDGETS = (8.0, 2.0)


def made(seed: str, repetitions: int = 2, methods=METHODS, epsilons=BUDGETS, more=()) -> list[Job]:
    return jobs("digits", methods, repetitions, [*SMALL, f"run.seed={seed}", *more], epsilons)


def released(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What a run has published: its only round's mean, as a sum, and the noise scale of every
    coordinate."""
    folder = RunFolder.open(path)
    checkpoint = folder.checkpoints.latest(Assembly(folder.recipe()).model.layers)
    plan, mean = checkpoint.transcript.plan, checkpoint.transcript.mean
    sigma = np.repeat([part.sigma for part in plan.parts], [part.size for part in plan.parts])
    return mean.double().numpy() * plan.denominator, sigma


def attack(one: tuple, other: tuple) -> np.ndarray:
    """The private sum, if the two releases of it share their noise."""
    (y1, s1), (y2, s2) = one, other
    return (y1 / s1 - y2 / s2) / (1 / s1 - 1 / s2)


@pytest.fixture(scope="module")
def truth(tmp_path_factory) -> np.ndarray:
    """The private sum itself, from a run without noise."""
    _, job = made("0", 1, methods=("gaussian", "none"), epsilons=(8.0,))
    path = tmp_path_factory.mktemp("truth") / "run"
    launch.simulate(job.recipe, run_dir=path)
    return released(path)[0]


def found(one: tuple, other: tuple, truth: np.ndarray) -> float:
    """Correlation of what the attack computes with the private sum."""
    return float(np.corrcoef(attack(one, other), truth)[0, 1])


@pytest.mark.parametrize("seed", ["none", "0", "7"])
def test_the_attack_finds_nothing_in_a_comparison(tmp_path, truth, seed):
    """Without a seed every run was made under seed 0, and the correlation was 0.99998."""
    todo = made(seed)
    running.run(todo, tmp_path)
    outputs = [released(tmp_path / job.folder) for job in todo]
    different = [
        (a, b) for a, b in itertools.combinations(outputs, 2) if not np.array_equal(a[1], b[1])
    ]
    assert len(different) >= 12
    assert max(abs(found(a, b, truth)) for a, b in different) < 6 / math.sqrt(len(truth))
    noises = [(y - truth) / s for y, s in outputs]
    for one, other in itertools.combinations(noises, 2):
        assert abs(float(np.corrcoef(one, other)[0, 1])) < 6 / math.sqrt(len(truth))


def test_the_attack_finds_shared_noise(tmp_path, truth):
    """Power: two runs of one public seed, at two budgets."""
    outputs = []
    for epsilon in BUDGETS:
        (job,) = made("0", 1, methods=("gaussian",), epsilons=(epsilon,))
        recipe = job.recipe.model_copy(
            update={"run": job.recipe.run.model_copy(update={"seed": 0})}
        )
        launch.simulate(recipe, run_dir=tmp_path / str(epsilon))
        outputs.append(released(tmp_path / str(epsilon)))
    assert found(*outputs, truth) > 0.99


class TestKeys:
    def test_without_a_seed_no_run_has_one(self):
        assert {job.recipe.run.seed for job in made("none")} == {None}

    def test_with_a_seed_every_run_has_its_own(self):
        seeds = [job.recipe.run.seed for job in made("5", 3)]
        assert len(set(seeds)) == len(seeds) == 12
        assert 5 not in seeds
        assert seeds == [job.recipe.run.seed for job in made("5", 3)]
        assert not set(seeds) & {job.recipe.run.seed for job in made("6", 3)}

    def test_a_runs_seed_depends_on_all_that_it_releases(self):
        """The same runs in another comparison share noise only if they are the same runs."""
        (plain,) = made("5", 1, methods=("gaussian",), epsilons=(8.0,))
        for more in (
            ["mechanism.bound=50.0"],
            ["privacy.epsilon=9.0"],
            ["privacy.delta=1e-6"],
            ["federation.rate=0.5"],
            ["training.lr=1.0"],
            ["data.alpha=0.3"],
            ["model.hidden=[4]"],
        ):
            epsilons = () if more[0].startswith("privacy.epsilon") else (8.0,)
            (other,) = made("5", 1, methods=("gaussian",), epsilons=epsilons, more=more)
            assert other.recipe.run.seed != plain.recipe.run.seed
        (same,) = made("5", 1, methods=("gaussian",), epsilons=(8.0,))
        assert same.recipe.run.seed == plain.recipe.run.seed

    def test_repetitions_and_methods_start_from_the_same_models(self):
        """Initial models are public; that they are equal makes methods comparable."""
        todo = made("5", 2)
        assert len({(job.repetition, job.recipe.model.seed) for job in todo}) == 2

    def test_unseeded_rings_differ(self):
        assert len({KeyRing.from_seed(None).root for _ in range(100)}) == 100


class TestWhatAComparisonCosts:
    @pytest.fixture(scope="class")
    def summary(self, tmp_path_factory):
        todo, out = made("none"), tmp_path_factory.mktemp("set")
        running.run(todo, out)
        return todo, out, summary_of(todo, out)

    def test_all_published_cells_together(self, summary):
        """Everybody takes part in every round, so all is one Gaussian release: known in closed
        form."""
        todo, out, figures = summary
        precision = 0.0
        for job in todo:
            with Ledger(out / job.folder / "ledger.sqlite") as ledger:
                precision += sum(
                    1 / charge.event.noise_multiplier**2 for charge in ledger.charges()
                )
        together = figures["together"]
        assert together["epsilon"] == pytest.approx(
            gaussian_epsilon(math.sqrt(precision), 1e-5), rel=1e-6
        )
        assert together["epsilon"] > max(run["epsilon"] for run in figures["runs"])
        assert together["runs"] == together["runs_protected"] == 8

    def test_a_run_without_privacy_makes_the_whole_infinite(self, tmp_path):
        todo = made("0", 1, methods=("gaussian", "none"), epsilons=(8.0,))
        running.run(todo, tmp_path)
        together = joint.together(todo, tmp_path)
        assert together["epsilon"] == math.inf
        with Ledger(tmp_path / todo[0].folder / "ledger.sqlite") as ledger:
            assert together["epsilon_protected"] == pytest.approx(ledger.epsilon(1e-5), rel=1e-6)
        assert (together["runs"], together["runs_protected"]) == (2, 1)

    @pytest.mark.parametrize(
        ("more", "partitions", "why"),
        [
            ([], ("iid", "dirichlet"), "a client holds different data in each partition"),
            (
                ["gaussian/privacy.relation=replace-one"],
                ("iid",),
                r"different things \(client, add-remove; client, replace-one\)",
            ),
            (
                [
                    "run.patience=1",
                    "run.evaluate_every=1",
                    "federation.rounds=4",
                    "federation.server_lr=1e-9",
                ],
                ("iid",),
                "stopped early by its results",
            ),
        ],
    )
    def test_runs_that_protect_different_things_have_no_joint_epsilon(
        self, tmp_path, more, partitions, why
    ):
        todo = jobs("digits", METHODS, 1, [*SMALL, "run.seed=0", *more], (8.0,), partitions)
        running.run(todo, tmp_path)
        summary = summary_of(todo, tmp_path)
        together = summary["together"]
        assert (together["epsilon"], together["epsilon_protected"]) == (None, None)
        assert re.search(why, together["why"])
        assert "the runs have no joint epsilon" in shown(summary)

    def test_runs_of_earlier_calls_in_the_folder_count_too(self, tmp_path):
        first, second = made("0", 1, epsilons=(8.0,)), made("0", 1, epsilons=(2.0,))
        running.run(first, tmp_path)
        alone = joint.together(first, tmp_path)
        running.run(second, tmp_path)
        both = joint.together(second, tmp_path)
        assert (alone["runs"], both["runs"]) == (2, 4)
        assert both["epsilon"] > alone["epsilon"]
        assert both == joint.together([*first, *second], tmp_path)

    def test_nor_have_runs_for_people_at_different_numbers_of_clients(self, tmp_path):
        changes = {
            "federation.clients": 20,
            "federation.rounds": 1,
            "privacy.relation": "replace-one",
        }
        found = simulations.study(
            "digits",
            grid={"federation.overlap": [1, 2]},
            seeds=1,
            folder=tmp_path,
            overrides=changes,
        )
        assert found.joint["epsilon"] is None
        assert "client, replace-one at 2 nodes" in found.joint["why"]

    @pytest.mark.parametrize(
        ("grid", "more"),
        [
            ({"data.alpha": [0.1, 10.0]}, {}),
            ({"data.partition_seed": [0, 1]}, {}),
            (
                {"federation.users": [[*range(10)] * 2, sorted([*range(10)] * 2)]},
                {"privacy.unit": "user"},
            ),
        ],
    )
    def test_nor_have_runs_whose_units_hold_other_data(self, tmp_path, grid, more):
        changes = {
            "federation.clients": 20,
            "federation.rounds": 1,
            "data.partition": "dirichlet",
            **more,
        }
        changes |= {key: values[0] for key, values in grid.items()}
        found = simulations.study("digits", grid=grid, seeds=1, folder=tmp_path, overrides=changes)
        assert found.joint["epsilon"] is None
        assert "holds different data in each partition" in found.joint["why"]

    @pytest.mark.parametrize(
        ("key", "values", "alike"),
        [
            ("data.users", ["patient", "ward"], False),
            ("data.file", ["a.csv", "b.csv"], False),
            ("data.inputs", [["x"], ["x", "z"]], True),
        ],
    )
    def test_nor_have_runs_on_tables_whose_units_hold_other_rows(
        self, tmp_path, key, values, alike
    ):
        n = np.arange(100)
        table = pandas.DataFrame(
            {"x": n / 100, "z": -n / 100, "y": n % 2, "patient": n % 20, "ward": n // 5}
        )
        for name, rows in (("a.csv", table), ("b.csv", table[::-1])):
            rows.to_csv(tmp_path / name, index=False)
        changes = {
            "data.name": "table",
            "data.file": str(tmp_path / "a.csv"),
            "data.test_file": str(tmp_path / "b.csv"),
            "data.target": "y",
            "data.inputs": ["x"],
            "data.users": "patient",
            "data.partition": "natural",
            "federation.clients": 20,
            "federation.rounds": 1,
            "privacy.epsilon": 1,
        }
        values = [str(tmp_path / value) for value in values] if key == "data.file" else values
        changes[key] = values[0]
        found = simulations.study(
            "digits", grid={key: values}, seeds=1, folder=tmp_path / "s", overrides=changes
        )
        assert (found.joint["epsilon"] is not None) == alike

    def test_runs_with_noise_in_shares_have_one(self, tmp_path):
        changes = {"federation.rounds": 1}
        grid = {"federation.server_lr": [0.1, 0.2]}
        found = simulations.study(
            "distributed-digits", grid=grid, seeds=1, folder=tmp_path, overrides=changes
        )
        one = max(found.to_frame()["epsilon"])
        assert one < found.joint["epsilon"] < 2 * one

    def test_every_cell_carries_its_guarantee(self, summary):
        *_, figures = summary
        for cell in figures["cells"]:
            assert cell["noise_reproducible"] is False
            assert cell["guarantee"].startswith("proven (client-level, add-remove")
        for run in figures["runs"]:
            assert run["guarantee"] == RunFolder(Path(run["folder"])).result()["guarantee"]

    def test_two_repetitions_are_compared(self, summary):
        *_, figures = summary
        assert {row["method"] for row in figures["differences"]} == {METHODS[1]}
        assert all(row["seeds"] == 2 for row in figures["differences"])
