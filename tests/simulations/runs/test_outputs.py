"""What a run writes and prints: one guarantee sentence everywhere, and nothing public about who
took part."""

from __future__ import annotations

import html
import json
import re
import stat
from io import StringIO
from pathlib import Path

import pytest
from compared import summary_of
from flwr.app import Context, RecordDict
from rich.console import Console
from typer.testing import CliRunner

from fedlgm.noise.keys import KeyRing
from fedlgm.package_conflicts import PACKAGES
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger_file import connect
from fedlgm_lab.studies import comparison, running
from fedlgm_lab.studies.jobs import jobs
from simulations import launch
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines.flower_entry import make_client_app, make_server_app
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.summaries import ledgers, terminal
from tests.support.undrawn import without_drawing

CAVEAT = "simulation: the seed is public, and with it the noise can be drawn again"
PRIVATE = {"cohort", "present", "discarded", "seconds", "seconds_per_round", "failures"}
KINDS = {
    "seeded": {},
    "unseeded": {"run": {"seed": None}},
    "conditional": {"federation": {"sampling": "fixed"}},
    "unprotected": {"mechanism": {"name": "none"}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A finished run of every kind; one of its clients sends NaN, so that something was
    discarded."""
    from federations import tiny_values

    made = {}
    for kind, sections in KINDS.items():
        raw = tiny_values()
        for section, values in sections.items():
            raw[section] = {k: v for k, v in (raw[section] | values).items() if v is not None}
        made[kind] = tmp_path_factory.mktemp("runs") / kind
        launch.simulate(recipes.Recipe.model_validate(raw), run_dir=made[kind])
    return made


@pytest.fixture(scope="module")
def reported(runs) -> dict[str, str]:
    """Output of the command `report` for every run. Each run has its report from then on."""
    with without_drawing():
        return {
            kind: CliRunner().invoke(app, ["report", str(run), "--json"]).stdout
            for kind, run in runs.items()
        }


def plain(shown: object) -> str:
    """What a terminal shows, without borders and line breaks."""
    console = Console(width=400, record=True, file=StringIO())
    console.print(shown)
    return re.sub(r"[\s│╭╮╰╯─]+", " ", console.export_text())


def expected(run: Path) -> str:
    """The sentence, made from the plan itself."""
    folder = RunFolder.open(run)
    checkpoint = folder.checkpoints.latest(Assembly(folder.recipe()).model.layers)
    seeded = folder.recipe().run.seed is not None
    return checkpoint.transcript.plan.guarantee.sentence(noise_reproducible=seeded)


@pytest.mark.parametrize("kind", KINDS)
class TestOneSentence:
    """ "Proven" stood in reports, JSON and notebooks of seeded runs without the caveat that the
    terminal had."""

    def test_result_file(self, runs, kind):
        result = RunFolder(runs[kind]).result()
        assert result["guarantee"] == expected(runs[kind])
        assert result["noise_reproducible"] is (kind != "unseeded")
        assert (CAVEAT in result["guarantee"]) is (kind != "unseeded")

    def test_terminal(self, runs, kind):
        assert expected(runs[kind]) in plain(terminal.summary(RunFolder(runs[kind]).result()))

    def test_report(self, runs, reported, kind):
        assert html.escape(expected(runs[kind])) in (runs[kind] / "report.html").read_text()

    def test_ledger(self, runs, kind):
        summary = ledgers.ledger_report(runs[kind])
        assert summary["guarantee"] == expected(runs[kind])
        assert summary["noise_reproducible"] is (kind != "unseeded")
        assert expected(runs[kind]) in plain(terminal.ledger_table(summary))

    def test_the_ledger_is_opened_once(self, runs, kind, monkeypatch):
        opened = []

        def count(path, *, reading):
            opened.append(path)
            return connect(path, reading=reading)

        monkeypatch.setattr("fedlgm.privacy.ledger.connect", count)
        ledgers.ledger_report(runs[kind])
        assert opened == [runs[kind] / "ledger.sqlite"]

    def test_command(self, runs, reported, kind):
        shown = CliRunner().invoke(app, ["ledger", str(runs[kind]), "--json"]).stdout
        for printed in map(json.loads, (shown, reported[kind])):
            assert printed["guarantee"] == expected(runs[kind])
            assert printed["noise_reproducible"] is (kind != "unseeded")

    def test_flower_app(self, runs, kind, tmp_path, capsys):
        """The ServerApp of the Flower app, over clients in this process."""
        text = (runs[kind] / "recipe.toml").read_text()
        (tmp_path / "again.toml").write_text(text)
        keys = runs[kind].parent / "keys"
        new_folder.create(
            keys, recipes.load(runs[kind] / "recipe.toml")
        ) if not keys.exists() else None
        config = {
            "recipe": str(tmp_path / "again.toml"),
            "run-dir": str(tmp_path / "run"),
            "nodes": "workers",
            "simulated": True,
            "keys": str(keys) if kind == "unseeded" else "",
        }
        grid = LocalGrid(make_client_app())
        grid._context = Context(
            run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config
        )
        context = Context(
            run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config
        )
        make_server_app()(grid=grid, context=context)
        assert expected(tmp_path / "run") in capsys.readouterr().out
        assert RunFolder(tmp_path / "run").result()["guarantee"] == expected(runs[kind])


def test_the_command_prints_it_with_and_without_json(tiny_file, tmp_path):
    command = ["simulate", str(tiny_file), "--engine", "local", "--run-dir"]
    printed = json.loads(CliRunner().invoke(app, [*command, str(tmp_path / "a"), "--json"]).stdout)
    assert printed["guarantee"] == expected(tmp_path / "a")
    assert printed["noise_reproducible"] is True
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command, str(tmp_path / "b")]).stdout
    assert CAVEAT in re.sub(r"[\s│]+", " ", shown)


@pytest.mark.parametrize("seed", ["3", "none"])
def test_planned_runs_say_the_same_before_they_start(tiny_file, seed):
    done = CliRunner().invoke(app, ["plan", str(tiny_file), "--set", f"run.seed={seed}", "--json"])
    printed = json.loads(done.stdout)
    assert (CAVEAT in printed["guarantee"]) is (seed == "3")


def test_applications_say_it(tmp_path):
    values = ["data=synthetic", "dimension=4", "rows=200", "rank=2", "clients=3", "epsilon=2"]
    changes = [part for value in values for part in ("--set", value)]
    command = ["apply", "pca", *changes, "--json", "--out", str(tmp_path / "a")]
    printed = json.loads(CliRunner().invoke(app, command).stdout)
    assert printed["guarantee"].startswith(
        "conditional (example-level, add-remove, a trusted server adds the noise)"
    )
    assert printed["guarantee"].endswith(CAVEAT)
    assert printed["noise_reproducible"] is True
    assert printed["guarantee"] in plain(terminal.application(printed))


def test_comparisons_say_it(tmp_path, tiny_file):
    todo = jobs(str(tiny_file), ["gaussian", "none"], 1)
    running.run(todo, tmp_path)
    summary = summary_of(todo, tmp_path)
    shown = plain(comparison.tables(summary))
    for cell in summary["cells"]:
        assert cell["guarantee"] == expected(tmp_path / todo[summary["cells"].index(cell)].folder)
        assert cell["noise_reproducible"] is True
        assert cell["guarantee"] in shown


def test_the_sentence_is_made_in_one_place():
    """Whoever writes status and frame together writes it by hand."""
    root = Path(recipes.__file__).parents[2]
    own = root / "fedlgm" / "privacy" / "guarantee.py"
    for path in (path for name in PACKAGES for path in root.glob(f"{name}/**/*.py")):
        for words in ("a trusted server adds the noise", "each client adds its own noise"):
            assert path == own or f", {words}" not in path.read_text(), path
    sentence = Guarantee("none", "no noise", unit="example").sentence(noise_reproducible=True)
    assert (
        sentence
        == "NOT PRIVATE: no noise [example-level, add-remove, a trusted server adds the noise]; "
        f"{CAVEAT}"
    )


class TestWhoTookPart:
    """Exact cohort sizes stood in metrics.jsonl: published, they add about epsilon 0.53 in the
    default recipe."""

    def test_public_files_hold_none_of_it(self, runs, reported):
        for kind, run in runs.items():
            public = [
                p
                for p in run.rglob("*")
                if p.is_file() and p.relative_to(run).parts[0] != "private"
            ]
            names = {p.name for p in public}
            assert {
                "metrics.jsonl",
                "result.json",
                "ledger.sqlite",
                "recipe.toml",
                "report.html",
            } <= names
            for path in public:
                if path.name == "recipe.toml" or path.suffix == ".safetensors":
                    continue
                content = path.read_text(encoding="utf-8", errors="replace")
                for word in PRIVATE - ({"cohort"} if path.name == "report.html" else set()):
                    assert f'"{word}"' not in content, (kind, path, word)

    def test_rows_and_results_by_key(self, runs):
        for run in runs.values():
            folder = RunFolder(run)
            assert not PRIVATE & set().union(*(row.keys() for row in folder.rows()))
            assert not PRIVATE & folder.result().keys()

    def test_the_operator_has_it(self, runs):
        """Power: it is written down, elsewhere."""
        for run in runs.values():
            rows = RunFolder(run).rows(private=True)
            assert all(PRIVATE - {"seconds_per_round"} <= row.keys() for row in rows)
        assert len({row["cohort"] for row in RunFolder(runs["seeded"]).rows(private=True)}) > 1

    def test_private_files_are_their_owners_alone(self, runs):
        for run in runs.values():
            assert stat.S_IMODE((run / "private").stat().st_mode) == 0o700
            for path in (run / "private").iterdir():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path

    def test_private_files_are_private_from_their_first_moment(self, tmp_path, tiny):
        """Whatever the process's mask is, and when they are written again."""
        import os

        before = os.umask(0)
        try:
            folder = new_folder.create(tmp_path / "run", tiny(run={"seed": None}))
            folder.keys(None)
            row = {"noise_norm": 1.0, "noise_scale": 1.0}
            own = {"present": 1, "discarded": 0, "seconds": 1.0, "failures": [], "exhausted": []}
            folder.append(row | {"round": 1}, own | {"round": 1, "cohort": 7})
            folder.append(row | {"round": 2}, own | {"round": 2, "cohort": 9})
            folder.truncate(1)
            folder.private_file("flower.log")
        finally:
            os.umask(before)
        private = list((tmp_path / "run" / "private").iterdir())
        assert {path.name for path in private} == {"keys", "diagnostics.jsonl", "flower.log"}
        assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
        assert stat.S_IMODE((tmp_path / "run" / "private").stat().st_mode) == 0o700
        assert [row["cohort"] for row in folder.rows(private=True)] == [7]

    def test_no_times_of_day(self, runs):
        """How long a round took shows how many clients it had."""
        import sqlite3

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        for run in runs.values():
            with sqlite3.connect(run / "ledger.sqlite") as db:
                columns = [row[1] for row in db.execute("PRAGMA table_info(charges)")]
                assert all(
                    ":" not in str(value)
                    for row in db.execute("SELECT charged_on FROM charges")
                    for value in row
                )
            assert "charged_at" not in columns
            board = EventAccumulator(str(run / "tensorboard"))
            board.Reload()
            for tag in board.Tags()["scalars"]:
                assert [event.wall_time for event in board.Scalars(tag)] == [
                    event.step for event in board.Scalars(tag)
                ]

    def test_reports_show_it_only_when_asked(self, runs, reported):
        for run in runs.values():
            text = (
                (run / "report.html")
                .read_text()
                .replace(html.escape((run / "recipe.toml").read_text()), "")
            )
            assert "cohort" not in text
            assert "discarded" not in text


def test_keys_go_when_a_run_is_finished(runs):
    assert not (runs["unseeded"] / "private" / "keys").exists()
    assert KeyRing.from_seed(None).secret
