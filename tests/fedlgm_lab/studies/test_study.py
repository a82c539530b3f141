"""`simulations.study`: which runs a grid makes, that nothing runs twice, and what it shows."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from diverging import install
from own_objects import DATA, Alike, Net
from scipy import stats
from sklearn.metrics import roc_auc_score

import simulations
from fedlgm import mechanisms
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm_lab.studies import one_run, records
from fedlgm_lab.studies import run_processes as processes
from fedlgm_lab.studies.jobs import grid_jobs
from fedlgm_lab.studies.progress import Line
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.study import base_of
from simulations import launch
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder

CHANGES = {
    "federation.clients": 20, "federation.rounds": 2, "federation.rate": 0.5, "privacy.delta": 0.01,
    "privacy.accountant": "rdp", "run.seed": 7, "run.evaluate_every": 1,
}  # fmt: skip


GRID = {"mechanism": ["uniform", Alike("mine"), "none"], "privacy.epsilon": [8.0, 2.0]}


def auc(outputs, targets):
    return roc_auc_score(targets, outputs[:, 1] - outputs[:, 0])


def length(round, module):
    return {"length": torch.nn.utils.parameters_to_vector(module.parameters()).norm().item()}


def studied(folder: Path, grid: dict = GRID, **more) -> Study:
    overrides = CHANGES | more.pop("overrides", {})
    options = {"seeds": 2, "metrics": {"auc": auc}, "progress": False} | more
    return simulations.study(
        model=Net, data=DATA, grid=grid, overrides=overrides, folder=folder, **options
    )


def lasting(study: Study) -> pd.DataFrame:
    return study.to_frame().drop(columns=["seconds", "folder"])


def planned(grid: dict, overrides: dict | None = None, seeds: int = 1):
    base, own, options = base_of(
        None, grid, {"model": Net, "data": DATA}, CHANGES | (overrides or {})
    )
    return grid_jobs(base, grid, range(seeds), options, own)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return studied(tmp_path_factory.mktemp("study"))


# -- which runs --------------------------------------------------------------------------------------------------------


def test_every_combination_is_a_run_and_every_run_a_folder(finished: Study) -> None:
    frame = finished.to_frame()
    assert len(frame) == (2 * 2 + 1) * 2  # a budget means nothing without privacy
    assert list(frame.columns[:4]) == ["method", "mechanism", "privacy.epsilon", "seed"]
    assert {
        "epsilon",
        "claimed_epsilon",
        "audited_epsilon",
        "accuracy",
        "loss",
        "auc",
        "seconds",
    } <= set(frame.columns)
    assert (frame["status"] == "finished").all()
    assert (
        frame[frame["method"] != "none"]
        .apply(lambda row: row["epsilon"] <= row["privacy.epsilon"], axis=1)
        .all()
    )
    for row in frame.itertuples():
        result = RunFolder.open(Path(row.folder)).result()
        assert (row.accuracy, row.epsilon, row.auc) == (
            result["accuracy"], result["epsilon"], result["metrics"]["auc"],
        )  # fmt: skip
    assert len(set(frame["folder"])) == len(frame)
    history = finished.history()
    assert len(history) == len(frame) * CHANGES["federation.rounds"]
    assert {"round", "auc", "epsilon"} <= set(history.columns)


def test_a_method_may_stand_in_it_twice_with_other_options() -> None:
    alike = Alike("b", bound=0.5)
    grid = {
        "mechanism": [
            "uniform",
            ("small", "uniform", {"bound": 0.5, "training.lr": 0.3}),
            Alike("a"),
            alike,
            Alike,
        ]
    }
    made = {job.method: job for job in planned(grid, {"mechanism.bound": 2.0})}
    assert list(made) == ["uniform", "small", "a", "b", "Alike"]
    assert [made[label].recipe.mechanism.options for label in ("uniform", "small")] == [
        {"bound": 2.0},
        {"bound": 0.5},
    ]
    assert made["small"].recipe.training.lr == 0.3 != made["uniform"].recipe.training.lr
    assert made["b"].own.mechanism is alike
    assert len({job.recipe.run.seed for job in made.values()}) == 5  # no two share their noise
    (registered,) = planned({"mechanism": [mechanisms.get("uniform", bound=0.25)]})
    assert registered.recipe.mechanism.options["bound"] == 0.25


def test_any_key_of_the_recipe_may_vary() -> None:
    made = planned(
        {"training.lr": np.array([0.1, 0.2]), "data.partition": ["iid", "dirichlet"]}, seeds=2
    )
    assert [(job.recipe.training.lr, job.recipe.data.partition) for job in made[::2]] == [
        (0.1, "iid"), (0.1, "dirichlet"), (0.2, "iid"), (0.2, "dirichlet"),
    ]  # fmt: skip
    assert made[0].folder == "snr-consistent-lr=0.1-iid-run0"
    assert made[0].recipe.model.seed == made[2].recipe.model.seed != made[1].recipe.model.seed
    long = planned({"mechanism": [("a" * 300, "uniform", {})]}, seeds=12)[-1]
    assert long.recipe.name == long.folder
    odd = planned({"mechanism": [("a label / with: everything", "uniform", {})]})[0].folder
    assert Path(odd).name == odd


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"epsilon": [1]}, "epsilon: unknown key; did you mean 'privacy.epsilon'"),
        ({7: [1]}, r"grid\[7\]: a recipe has no such key"),
        ({"privacy.epsilom": [1]}, "privacy.epsilom: unknown key; did you mean 'epsilon'"),
        ({"privcy.epsilon": [1]}, "privcy: unknown key; did you mean 'privacy'"),
        ({"title": ["one", "other"]}, "set it with overrides"),
        ({"run.seed": [1]}, "set it with seeds and overrides"),
        ({"mechanism.name": ["uniform"]}, "set it with grid"),
        ({"privacy.epsilon": 8.0}, "must be a list of values"),
        ({"privacy.epsilon": []}, "must be a list of values"),
        ({"privacy.epsilon": [-1.0]}, "privacy.epsilon"),
        ({"mechanism": ["uniform", "unifrm"]}, "unknown mechanism 'unifrm'"),
        ({"mechanism": ["uniform", "uniform"]}, "two mechanisms have the label 'uniform'"),
        (
            {"mechanism": ["uniform", ("uniform", "gaussian", {})]},
            "two mechanisms have the label 'uniform'",
        ),
        ({"mechanism": [("a", "uniform", {"bund": 1})]}, "'a': uniform has no option 'bund'"),
        ({"mechanism": [("a", Alike, {"bund": 1})]}, "bund"),
        ({"mechanism": [("a", Alike("x"), {"bound": 1})]}, "takes no further options"),
        ({"mechanism": [7]}, "an entry of grid"),
        ({"mechanism": [("uniform", {"bound": 1})]}, "an entry of grid"),
        (
            {"mechanism": ["uniform"], "mechanism.kappa": [1]},
            "none of uniform has the option kappa",
        ),
    ],
)
def test_what_is_wrong_with_a_grid_is_said_before_anything_runs(
    grid: dict, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as said:
        studied(tmp_path / "set", grid)
    assert "--set" not in str(said.value) or "kappa" in str(said.value)
    assert not list(tmp_path.glob("set/*"))


@pytest.mark.parametrize(
    ("measures", "message"),
    [
        ({"metrics": {"auc": lambda outputs, targets: np.nan}}, "metric 'auc' is nan"),
        ({"metrics": "auc"}, "metrics takes functions, such as"),
        ({"evaluate": lambda round, module: {"length": np.nan}}, "finite numbers by name"),
        ({"evaluate": "length"}, "evaluate takes functions, such as"),
    ],
)
def test_a_metric_that_cannot_be_reported_is_said_before_anything_runs(
    measures, message, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        studied(tmp_path, **measures)
    assert not list(tmp_path.iterdir())


def test_figures_of_the_released_model_are_in_the_frame_and_the_history(tmp_path: Path) -> None:
    found = studied(tmp_path, {"mechanism": ["uniform"]}, seeds=1, evaluate=length)
    (row,) = found.to_frame().to_dict("records")
    assert found.history()["length"].iloc[-1] == row["length"] > 0
    assert found.table(["length"])["length"].tolist() == [row["length"]]


# -- nothing twice -----------------------------------------------------------------------------------------------------


def test_the_same_call_again_runs_nothing(finished: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("a finished run was made again")

    monkeypatch.setattr(launch, "simulate", refuse)
    again = studied(finished.folder)
    pd.testing.assert_frame_equal(again.to_frame(), finished.to_frame())
    # A metric that is asked for later is measured on the models that are there.
    further = studied(
        finished.folder,
        metrics={"auc": auc, "error": lambda outputs, targets: 1 - auc(outputs, targets)},
    )
    assert np.allclose(further.to_frame()["error"], 1 - finished.to_frame()["auc"])
    # So are figures of the released model.
    with_lengths = studied(finished.folder, evaluate=length).to_frame()
    module = simulations.resume(with_lengths["folder"][0], model=Net, data=DATA).model()
    assert with_lengths["length"][0] == length(0, module)["length"]
    assert with_lengths["length"].nunique() == len(with_lengths)


def test_a_study_that_is_stopped_goes_on_to_the_same_frame(
    finished: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun = launch.simulate, []
    part = GRID | {"mechanism": ["uniform"]}

    def stopping(recipe, **options):
        begun.append(recipe.name)
        if len(begun) == 3:
            options["progress"] = stop
        return real(recipe, **options)

    def stop(row):
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "simulate", stopping)
    with pytest.raises(KeyboardInterrupt):
        studied(tmp_path, part)
    monkeypatch.undo()
    whole = lasting(finished)
    pd.testing.assert_frame_equal(
        lasting(studied(tmp_path, part)), whole[whole["method"] == "uniform"]
    )


def test_a_worker_makes_the_run_that_this_process_would_make(
    finished: Study, tmp_path: Path
) -> None:
    job = planned(GRID, seeds=1)[0]
    index, how = processes.work(5, job, tmp_path, (str(Path.cwd()), []), False)
    assert (index, how) == (5, one_run.Ended())
    ours, theirs = (
        RunFolder.open(folder / job.folder).result() for folder in (tmp_path, finished.folder)
    )
    assert ours["model_sha256"] == theirs["model_sha256"]


# -- runs without figures ----------------------------------------------------------------------------------------------


def test_runs_that_are_refused_or_diverge_are_rows_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "modules", monkeypatch)
    grid = {
        "mechanism": [
            "uniform",
            ("lost", "uniform", {"federation.server_optimizer": "my_diverging:Step"}),
        ]
    }
    longer = {"federation.rounds": 3}
    found = studied(
        tmp_path / "set",
        grid | {"privacy.noise": ["independent", "banded"]},
        seeds=1,
        overrides=longer,
    )
    frame = found.to_frame().set_index(["method", "privacy.noise"])
    assert frame["status"].to_dict() == {
        ("uniform", "independent"): "finished", ("uniform", "banded"): "refused",
        ("lost", "independent"): "diverged", ("lost", "banded"): "refused",
    }  # fmt: skip
    assert "federation.sampling" in frame.loc[("uniform", "banded"), "reason"]
    assert "diverged" in frame.loc[("lost", "independent"), "reason"]
    assert frame.loc[("uniform", "independent"), "reason"] == ""
    assert found.joint["runs"] == 2  # what was refused has released nothing, what diverged has
    assert found.table()["failed"].tolist() == [0, 1, 1, 1]
    assert "--" in found.to_latex()
    with pytest.raises(ConfigError, match="holds a different run"):
        studied(
            tmp_path / "set",
            grid | {"privacy.noise": ["independent"]},
            seeds=1,
            overrides={"training.lr": 0.3},
        )


# -- what it shows -----------------------------------------------------------------------------------------------------


def test_the_table_has_means_and_students_intervals(finished: Study) -> None:
    frame, table = finished.to_frame(), finished.table()
    own = frame[(frame["method"] == "mine") & (frame["privacy.epsilon"] == 2.0)]["auc"]
    row = table[(table["method"] == "mine") & (table["privacy.epsilon"] == 2.0)].iloc[0]
    low, high = stats.t.interval(0.95, len(own) - 1, own.mean(), stats.sem(own))
    assert (row["auc"], row["auc_low"], row["auc_high"]) == pytest.approx((own.mean(), low, high))
    assert (row["n"], row["guarantee"]) == (2, "proven")
    assert np.isinf(table[table["method"] == "none"]["epsilon"]).all()


def test_latex_and_pictures(finished: Study, tmp_path: Path) -> None:
    text = finished.to_latex(tmp_path / "table.tex")
    assert text == (tmp_path / "table.tex").read_text()
    assert all(
        part in text
        for part in (r"\toprule", r"\pm", r"$\varepsilon$", "proven", r"$\infty$", r"accuracy (\%)")
    )
    for name, head, options in (
        ("a.png", b"\x89PNG", {}),
        (
            "a.svg",
            b"<?xml",
            {"x": "privacy.epsilon", "y": "auc", "labels": {"mine": "our mechanism"}},
        ),
        ("a.pdf", b"%PDF", {"x": "round", "spread": "std"}),
    ):
        figure = finished.plot(tmp_path / name, **options)
        assert (tmp_path / name).read_bytes().startswith(head)
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == [
        "uniform, 8.0", "uniform, 2.0", "mine, 8.0", "mine, 2.0", "none, -",
    ]  # fmt: skip
    for wrong in (
        {"x": "epsilon"},
        {"y": "f1"},
        {"spread": "range"},
        {"hue": "colour"},
        {"path": "a.gif"},
    ):
        with pytest.raises(ConfigError):
            finished.plot(**{"path": tmp_path / "b.png"} | wrong)


class Given:
    """Records of a study whose accuracy is the sum of its settings' numbers and the seed."""

    beside, searched, headline = None, [], "accuracy"
    keys = ("method", "mechanism", "model", "privacy.epsilon")

    @property
    def runs(self) -> pd.DataFrame:
        cells = [
            ("uniform", model, epsilon) for model in ("wide", "none") for epsilon in (8.0, 2.0)
        ]
        return pd.DataFrame(
            dict(
                zip(self.keys, (method, method, model, epsilon), strict=True),
                seed=seed,
                status="finished",
                epsilon=epsilon,
                claimed_epsilon=epsilon,
                guarantee="proven",
                accuracy=(500 if model == "wide" else 400) + epsilon + seed,
            )
            for method, model, epsilon in cells
            for seed in range(3)
        )


def drawn(study: Study, **options) -> tuple[dict[str, list[float]], str]:
    """The means of a picture's lines by label, and the legend's title."""
    axes = study.plot(**options).axes[0]
    lines = {bars.get_label(): [float(y) for y in bars[0].get_ydata()] for bars in axes.containers}
    return lines, axes.get_legend().get_title().get_text()


def test_a_line_joins_no_different_settings() -> None:
    """Models at 500 and 400 were one line at 450 +- 53, with the intervals of six independent
    runs."""
    study = Study(Path("given"), Given())
    assert drawn(study, x="privacy.epsilon") == (
        {"wide": [509.0, 503.0], "none": [409.0, 403.0]},
        "model",
    )
    assert drawn(study, x="method")[0] == {
        "wide, 8.0": [509.0], "wide, 2.0": [503.0], "none, 8.0": [409.0], "none, 2.0": [403.0],
    }  # fmt: skip
    lines, title = drawn(study, x="privacy.epsilon", hue="method", spread="std")
    assert (lines, title) == ({"uniform": [459.0, 453.0]}, "mean over model")
    bars = study.plot(x="privacy.epsilon", hue="method").axes[0].containers[0][2][0].get_segments()
    low, high = stats.t.interval(
        0.95, 2, 459.0, 1 / np.sqrt(3)
    )  # the three seeds' means are 458, 459 and 460
    assert bars[0][:, 1] == pytest.approx([low, high])
    assert drawn(study, x="privacy.epsilon", hue=["method", "model"])[1] == "method, model"
    assert len(study.table("accuracy")) == 4
    assert len(study.difference("wide", "none").cells) == 2


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda study: study.table("f1"), "no metric 'f1' in this study; it has accuracy, "),
        (
            lambda study: study.to_latex("no/t.tex"),
            "cannot write no/t.tex: there is no folder no; create it first",
        ),
        (
            lambda study: study.to_latex("t.docx"),
            "the file of a LaTeX table must end in .tex, got 't.docx'",
        ),
        (
            lambda study: study.plot("no/p.svg"),
            "cannot write no/p.svg: there is no folder no; create it first",
        ),
        (
            lambda study: study.plot(y="method"),
            "no metric 'method' in this study; it has accuracy, ",
        ),
        (
            lambda study: study.difference("uniform", "mine", "status"),
            "no metric 'status' in this study; it has accur",
        ),
        (
            lambda study: study.difference("uniform", "mine", ["auc"]),
            "no metric ['auc'] in this study; it has accur",
        ),
        (
            lambda study: study.difference("uniform", "mine", at={"privacy.epsilon": 3}),
            "at: no privacy.epsilon = 3 in this study; it has 8.0, 2.0",
        ),
        (
            lambda study: Study.read(study.folder.parent),
            "has no study.json, which a study writes at its end: repeat",
        ),
    ],
)
def test_a_mistake_with_results_ends_in_one_sentence(
    finished: Study,
    make: Callable[[Study], object],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedlgmError) as error:
        make(finished)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_differences_are_paired_and_adjusted_for_the_number_of_cells(finished: Study) -> None:
    found = finished.difference("uniform", "mine", "auc")
    frame = finished.to_frame()
    both = [
        frame[frame["method"] == label].pivot_table(
            index="seed", columns="privacy.epsilon", values="auc"
        )
        for label in ("uniform", "mine")
    ]
    whole = simulations.difference(both[0].mean(axis=1), both[1].mean(axis=1))
    assert (found.mean, found.p) == pytest.approx((whole.mean, whole.p))
    assert found.cells["privacy.epsilon"].tolist() == [8.0, 2.0]
    for cell in found.cells.itertuples():
        single = simulations.difference(both[0][cell[1]], both[1][cell[1]])
        assert (cell.mean, cell.p) == pytest.approx((single.mean, single.p))
        assert cell.p <= cell.p_holm <= min(1.0, 2 * cell.p) + 1e-12
    assert len(finished.difference("uniform", "mine", at={"privacy.epsilon": 2}).cells) == 1
    for wrong in (("uniform", "nobody"), ("uniform", "mine", "f1"), ("uniform", "none")):
        with pytest.raises(ConfigError):
            finished.difference(*wrong)


def test_a_kept_file_gives_the_same_figures_without_the_runs(
    finished: Study, tmp_path: Path
) -> None:
    path = tmp_path / "study.json"
    path.write_text(strict_json.dumps(records.plain_values(finished.records, ["accuracy"])))
    again = Study.read(path)
    pd.testing.assert_frame_equal(again.table(), finished.table())
    pd.testing.assert_frame_equal(again.to_frame(), lasting(finished), check_dtype=False)
    assert again.to_latex() == finished.to_latex()
    pd.testing.assert_frame_equal(
        again.difference("uniform", "mine").cells, finished.difference("uniform", "mine").cells
    )
    assert len(again.history()) == len(finished.history())
    again.plot(tmp_path / "a.svg", x="round")
    assert repr(again).splitlines()[-1] == repr(finished).splitlines()[-1]


def test_every_study_can_be_read_from_its_folder(finished: Study) -> None:
    """Studies made in Python wrote no file, so their figures were lost with the process."""
    again, wanted = (
        Study.read(finished.folder),
        lasting(finished),
    )  # a later call may have added figures
    pd.testing.assert_frame_equal(again.to_frame()[wanted.columns], wanted, check_dtype=False)
    assert len(again.history()) == len(finished.history())
    assert drawn(again, x="round") == drawn(finished, x="round")


def test_finished_runs_stay_readable_if_a_second_call_has_other_objects(tmp_path: Path) -> None:
    """A module with new random weights turned the finished runs into failed ones, without figures
    and in silence."""
    grid = {"mechanism": ["uniform"]}
    call = {
        "overrides": CHANGES | {"federation.rounds": 1},
        "folder": tmp_path / "set",
        "progress": False,
    }
    before = simulations.study(model=Net(), data=DATA, grid=grid, seeds=1, **call).to_frame()
    for more in (
        {"seeds": 2},
        {"grid": {"mechanism": ["gaussian", "uniform"]}},
        {"workers": 2, "seeds": 2},
    ):
        with pytest.raises(ConfigError, match=r"was run with another model.*Study\.read\("):
            simulations.study(model=Net(), data=DATA, **{"grid": grid, "seeds": 1} | call | more)
    assert [path.name for path in (tmp_path / "set").iterdir() if path.is_dir()] == ["uniform-run0"]
    again = Study.read(tmp_path / "set").to_frame()
    assert again["accuracy"].tolist() == before["accuracy"].tolist()


@pytest.mark.parametrize(
    ("text", "message"), [(None, "is not a study.json"), ("[", "is not"), ("{}", "has no")]
)
def test_another_file_is_no_kept_study(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "study.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        Study.read(tmp_path / "study.json")


_TWELVE_LINES = """
study = simulations.study(
    model=Net, data=DATA, seeds=3, folder=folder, overrides=CHANGES,
    grid={"mechanism": ["uniform", "gaussian", Alike("mine")], "privacy.epsilon": [8.0, 2.0]},
)
frame = study.to_frame()
study.to_latex(folder / "table.tex")
study.plot(folder / "accuracy.svg", x="privacy.epsilon")
"""


@pytest.mark.slow
def test_at_most_twelve_lines_lead_to_a_frame_latex_and_a_picture(tmp_path: Path) -> None:
    """Three mechanisms, one of them an object, at two budgets with three seeds, on a user's model
    and arrays."""
    assert len(_TWELVE_LINES.strip().splitlines()) <= 12
    known = {
        "simulations": simulations,
        "Net": Net,
        "DATA": DATA,
        "Alike": Alike,
        "folder": tmp_path,
    }
    exec(_TWELVE_LINES, known | {"CHANGES": CHANGES | {"federation.rounds": 1}}, made := {})
    frame = made["frame"]
    assert len(frame) == 18
    assert (frame["status"] == "finished").all()
    assert set(frame["method"]) == {"uniform", "gaussian", "mine"}
    assert r"\bottomrule" in (tmp_path / "table.tex").read_text()
    assert "</svg>" in (tmp_path / "accuracy.svg").read_text()


def test_it_shows_itself_with_what_publishing_everything_costs(finished: Study) -> None:
    assert "published together, 8 runs cost epsilon" in repr(finished)
    assert "<table" in finished._repr_html_()
    assert repr(finished).splitlines()[1].split()[:3] == ["method", "privacy.epsilon", "n"]
    found = finished.difference("uniform", "mine")
    for text in (repr(found), found._repr_html_()):
        assert (
            f"difference over all cells: {found.mean:+.4g}, 95 % interval {found.low:+.4g} to"
            in text
        )


def test_a_mistake_does_not_count_as_finished_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(ConfigError):
        studied(tmp_path / "set", metrics={"auc": lambda outputs, targets: np.nan}, progress=True)
    assert capsys.readouterr().err == ""


def test_one_line_of_progress(finished: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, stream = planned(GRID, seeds=2), io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    line = Line(jobs)
    for job in jobs[:3]:
        for number in (1, 2):
            line.on_row(job, {"round": number})
        line.on_end(job)
    assert "3 of 10 runs" in stream.getvalue()
    assert stream.getvalue().count("\n") == 0
    line.close()
    assert stream.getvalue().endswith("\n")
