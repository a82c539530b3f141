"""`fedlgm compare`: which runs it makes, what it does with finished and interrupted ones, and what
it shows."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from compared import shown, summary_of
from typer.testing import CliRunner

from fedlgm.errors import ConfigError, RunError
from fedlgm_lab.studies import one_run, running
from fedlgm_lab.studies.jobs import Job, jobs
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.statistics import difference
from simulations.cli import app
from simulations.config import recipe
from simulations.config.facts import facts_of
from simulations.runs.folder import RunFolder

SMALL = [
    "federation.clients=20",
    "federation.rounds=6",
    "federation.rate=0.5",
    "training.epochs=1",
    "model.hidden=[4]",
    "run.evaluate_every=1",
    "run.checkpoint_every=2",
    "run.seed=3",
    "privacy.accountant=rdp",
]
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
METHODS = ("ladp", "full-dp", "none")


def small(
    methods: tuple[str, ...] = METHODS, seeds: int = 2, *more: str, **options: object
) -> list[Job]:
    return jobs("digits", methods, seeds, [*SMALL, *more], **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Job], Path]:
    todo, out = small(epsilons=(8.0, 2.0)), tmp_path_factory.mktemp("set")
    running.run(todo, out)
    return todo, out


# -- which runs --------------------------------------------------------------------------------------------------------


def test_one_run_for_every_combination() -> None:
    todo = small(METHODS, 2, epsilons=(8.0, 2.0), partitions=("dirichlet", "iid"))
    assert len(todo) == 2 * (2 + 2 + 1) * 2  # partitions, (methods x budgets, none once), seeds
    assert len({job.folder for job in todo}) == len(todo)
    assert {job.repetition for job in todo} == {0, 1}
    assert len({job.recipe.run.seed for job in todo}) == len(
        todo
    )  # runs that are compared share no noise
    for job in todo:
        assert job.recipe.model.seed == 3 + job.repetition
        assert job.recipe.data.partition == job.point["data.partition"]
        assert job.recipe.privacy.epsilon == (job.point["privacy.epsilon"] or 8.0)
        assert job.recipe.data.options == (
            {"alpha": 0.5} if job.point["data.partition"] == "dirichlet" else {}
        )
        assert recipe.Recipe.model_validate(job.recipe.model_dump(exclude_none=True)) == job.recipe


def test_options_reach_the_methods_that_have_them() -> None:
    overrides = [
        "mechanism.bound=0.3",
        "mechanism.score_cap=4.0",
        "full-dp/mechanism.bound=0.7",
        "ladp/training.lr=0.9",
    ]
    sections = {job.method: job.recipe for job in small(METHODS, 1, *overrides)}
    assert sections["ladp"].mechanism.options == {"bound": 0.3, "score_cap": 4.0}
    assert sections["full-dp"].mechanism.options == {"bound": 0.7}
    assert sections["none"].mechanism.options == {}
    assert [sections[m].training.lr for m in METHODS] == [0.9, 0.5, 0.5]


def test_what_adds_no_noise_is_compared_without_an_audit() -> None:
    """One such method does not end a set whose other runs are audited."""
    todo = small(METHODS, 1, "run.audit=true")
    assert {job.method: job.recipe.run.audit for job in todo} == {
        "ladp": True,
        "full-dp": True,
        "none": False,
    }


@pytest.mark.parametrize(
    ("name", "overrides", "methods"),
    [
        ("digits", [], ["snr-consistent", "uniform", "gaussian"]),
        ("digits", ["mechanism.name=gaussian"], ["gaussian", "uniform"]),
        ("ladp-fashion-mnist", [], ["ladp", "uniform", "gaussian"]),
        (
            "ladp-fashion-mnist-published",
            ["privacy.delta=1e-3"],
            ["ladp:published", "uniform", "gaussian"],
        ),
        ("dp-sgd-digits", [], ["dp-sgd", "auto-s"]),
        ("lm-dp-sgd-digits", [], ["lm-dp-sgd", "dp-sgd", "auto-s"]),
    ],
)
def test_without_methods_the_recipes_own_is_compared_with_plain_ones(
    name, overrides, methods
) -> None:
    todo = jobs(name, None, 1, overrides)
    assert [job.method for job in todo] == methods
    own = recipe.load(name, overrides).mechanism
    assert (todo[0].recipe.mechanism.name, todo[0].recipe.mechanism.variant) == (
        own.name,
        own.variant,
    )
    assert {**own.options, **todo[0].recipe.mechanism.options} == own.options


@pytest.mark.parametrize(
    "key", ["mechanism.name=gaussian", "mechanism.variant=published", "name=mine"]
)
def test_what_names_the_runs_is_not_set_for_all_of_them(key: str) -> None:
    """All runs were then of one mechanism, under the names of the others."""
    with pytest.raises(ConfigError, match="the names of a comparison's runs hold this key"):
        small(("uniform", "gaussian"), 1, key)


def test_a_variant_is_a_method_of_its_own() -> None:
    frame = ["privacy.trust=local", "privacy.max_participations=6", "training.gradient_clip=20.0"]
    todo = small(("ladp:published", "ladp"), 1, *frame, "ladp:published/mechanism.score_cap=1e-6")
    assert [job.recipe.mechanism.variant for job in todo] == ["published", "sound"]
    assert todo[0].folder == "ladp-published-eps8-dirichlet-run0"
    assert todo[0].recipe.mechanism.options["score_cap"] == 1e-6


def test_a_mechanism_of_ones_own_is_compared_by_its_dotted_name(tmp_path, monkeypatch) -> None:
    """The documentation's example: beside a bundled one, with options, folders, a table and a
    picture."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    own = "own_mechanism:InverseSize"
    todo = small((own, "uniform"), 1, f"{own}/mechanism.bound=0.5", "federation.rounds=1")
    assert [job.recipe.mechanism.name for job in todo] == [own, "uniform"]
    assert todo[0].recipe.mechanism.options == {"bound": 0.5}
    running.run(todo, tmp_path / "set")
    summary = summary_of(todo, tmp_path / "set")
    assert [cell["method"] for cell in summary["cells"]] == [own, "uniform"]
    assert all(cell["epsilon"] <= 8 for cell in summary["cells"])
    text = shown(summary, width=100)
    assert "…" not in text  # long names are folded
    assert "Differences:" not in text  # of one repetition there are none
    with pytest.raises(ConfigError, match="has no 'Inverse'; did you mean 'InverseSize'"):
        small(("own_mechanism:Inverse",), 1)


@pytest.mark.parametrize(
    ("methods", "more", "word"),
    [
        (("ladp", "nbafl"), (), "unknown mechanism 'nbafl'"),
        (("ladp:publishd",), (), "ladp has no variant 'publishd'; known: sound, published"),
        (("ladp", "ladp"), (), "different"),
        ((), (), "different"),
        (("ladp",), ("mechanism.kappa=2.0",), "kappa"),
        (("ladp",), ("full-dp/mechanism.bound=2.0",), "not among"),
        (("ladp",), ("ladp/privacy.epsilon=2",), "set it with --epsilon"),
        (("ladp",), ("ladp/run.seed=2",), "set it with --seeds"),
        (("ladp",), ("ladp/mechanism.name=gaussian",), "set it with --methods"),
        (("ladp",), ("ladp/data.partition=iid",), "set it with --partition"),
        (("ladp",), ("mechanism.score_cap=-1.0",), "score_cap"),
        (("ladp",), ("federation.cohorts=3",), "federation.cohorts"),
    ],
)
def test_bad_sets_are_refused(methods: tuple[str, ...], more: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        small(methods, 1, *more)
    with pytest.raises(ConfigError, match="--seeds"):
        small(("ladp",), 0)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_finished_runs_are_not_repeated(finished: tuple[list[Job], Path]) -> None:
    todo, out = finished
    before = {job.folder: (out / job.folder / "result.json").stat().st_mtime_ns for job in todo}
    rounds: dict[str, list[int]] = {}
    running.run(
        todo, out, on_row=lambda job, row: rounds.setdefault(job.folder, []).append(row["round"])
    )
    assert {
        job.folder: (out / job.folder / "result.json").stat().st_mtime_ns for job in todo
    } == before
    assert all(
        seen == [1, 2, 3, 4, 5, 6] for seen in rounds.values()
    )  # progress still covers the whole set


def test_a_budget_given_twice_is_not_twice_as_many_seeds() -> None:
    assert len(jobs("digits", ["uniform"], 2, (), (8.0, 8.0), ("iid", "iid"))) == 2


@pytest.mark.parametrize(
    ("key", "was", "now"), [("vectorize", "auto", "on"), ("compile", "auto", False)]
)
def test_what_was_auto_may_have_been_settled(key: str, was: str, now: object) -> None:
    wanted = recipe.load("digits", [f"training.{key}={was}"])
    stored = wanted.model_copy(update={"training": wanted.training.model_copy(update={key: now})})
    assert one_run._same(stored, wanted)
    assert not one_run._same(
        stored, recipe.load("digits", [f"training.{key}={was}", "training.lr=0.77"])
    )


@pytest.mark.slow
def test_an_interrupted_set_ends_like_an_uninterrupted_one(
    finished: tuple[list[Job], Path], tmp_path: Path
) -> None:
    todo, out = finished

    def interrupt(job: Job, row: dict) -> None:
        if job.folder == todo[1].folder and row["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        running.run(todo, tmp_path, on_row=interrupt)
    assert not (tmp_path / todo[1].folder / "result.json").exists()
    assert not (tmp_path / todo[2].folder).exists()
    (tmp_path / todo[2].folder / "checkpoints").mkdir(parents=True)  # there is nothing in it
    running.run(todo, tmp_path)
    for job in todo:
        ours, theirs = (RunFolder(folder / job.folder).result() for folder in (tmp_path, out))
        assert ours is not None
        assert theirs is not None
        assert ours["model_sha256"] == theirs["model_sha256"]
        assert ours["epsilon"] == theirs["epsilon"]


def test_another_set_in_the_same_folder_is_refused(
    finished: tuple[list[Job], Path], tmp_path: Path
) -> None:
    todo, out = finished
    shutil.copytree(out / todo[0].folder, tmp_path / todo[0].folder)
    with pytest.raises(ConfigError, match="another --out"):
        running.run(small(METHODS, 2, "training.lr=0.2", epsilons=(8.0, 2.0)), tmp_path)


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_runs(finished: tuple[list[Job], Path]) -> None:
    todo, out = finished
    summary = summary_of(todo, out)
    assert summary["methods"] == list(METHODS)
    cells = {(cell["method"], cell["epsilon_budget"]): cell for cell in summary["cells"]}
    assert set(cells) == {
        ("ladp", 8.0),
        ("ladp", 2.0),
        ("full-dp", 8.0),
        ("full-dp", 2.0),
        ("none", None),
    }

    def rows(method: str) -> list[list[dict]]:
        return [
            RunFolder(out / job.folder).rows()
            for job in todo
            if job.method == method and job.point["privacy.epsilon"] == 8.0
        ]

    accuracies = {
        m: [[row["accuracy"] for row in run[-5:]] for run in rows(m)] for m in ("ladp", "full-dp")
    }
    cell = cells["full-dp", 8.0]
    means = np.mean(accuracies["full-dp"], axis=1)
    assert cell["accuracy"] == pytest.approx(means.mean())
    assert cell["accuracy_std"] == pytest.approx(means.std(ddof=1))
    assert cell["noise_scale"] == pytest.approx(
        np.mean([sum(row["noise_norm"] for row in run) for run in rows("full-dp")])
    )
    expected = difference(accuracies["ladp"], accuracies["full-dp"])
    (found,) = (
        row
        for row in summary["differences"]
        if (row["metric"], row["epsilon_budget"]) == ("accuracy", 8.0)
    )  # with the method without a budget there is none
    assert found["method"] == "full-dp"
    assert [found[name] for name in ("mean", "low", "high", "p")] == pytest.approx(
        [expected.mean, expected.low, expected.high, expected.p]
    )
    assert cell["epsilon"] <= 8.0 < cells["none", None]["epsilon"]
    # Less budget, more noise.
    assert cells["full-dp", 2.0]["noise_scale"] > 2 * cell["noise_scale"]


def test_the_table_has_mean_and_spread_of_every_cell(finished: tuple[list[Job], Path]) -> None:
    todo, out = finished
    summary = summary_of(todo, out)
    text = shown(summary)
    for cell in summary["cells"]:
        line = next(
            row
            for row in text.splitlines()
            if f"{cell['accuracy']:.2%} ± {cell['accuracy_std']:.2%}" in row
        )
        assert cell["method"] in line
        assert cell["guarantee_status"] in line
    once = [job for job in todo if job.repetition == 0]
    assert "±" not in shown(summary_of(once, out))


def test_the_command(finished: tuple[list[Job], Path]) -> None:
    _, out = finished
    arguments = [
        "compare",
        "digits",
        "--methods",
        ",".join(METHODS),
        "--seeds",
        "2",
        "--out",
        str(out),
        "--json",
    ]
    arguments += [
        "--epsilon",
        "8",
        "--epsilon",
        "2",
        *(part for text in SMALL for part in ("--set", text)),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout.strip().splitlines()[-1])
    assert len(printed["runs"]) == 10
    assert printed["runs"][-1]["epsilon"] == "inf"
    assert (
        "seconds" not in (out / "study.json").read_text()
    )  # wall times show how many clients took part
    assert Study.read(out / "study.json").table()["n"].tolist() == [2] * 5
    assert {"runs.csv", "table.tex", "study.svg"} <= {path.name for path in out.iterdir()}


@pytest.mark.parametrize("name", [name for name in recipe.names() if name.startswith("ladp-")])
def test_bundled_recipes_are_valid(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parsed = recipe.load(name)
    assert bool(caught) == (parsed.privacy.delta >= 0.01)  # the paper's delta = 0.02 is remarked on
    assert parsed.mechanism.name == "ladp"
    assert parsed.federation.clients == 100
    assert parsed.sampling.expected == 10
    mechanism = parsed.mechanism.build()
    assert mechanism.variant == parsed.mechanism.variant
    assert mechanism.calibrate(facts_of(parsed)) > 0


def test_a_folder_with_the_name_of_a_run_is_not_removed(tmp_path: Path) -> None:
    """A run that lost its recipe has its ledger all the same: what it has spent must not be
    forgotten."""
    todo = jobs(None, ["uniform"], 1, ["federation.rounds=1"])
    kept = tmp_path / todo[0].folder / "ledger.sqlite"
    kept.parent.mkdir()
    kept.write_bytes(b"what was spent")
    with pytest.raises(RunError, match="not a run folder"):
        running.run(todo, tmp_path)
    assert kept.read_bytes() == b"what was spent"
