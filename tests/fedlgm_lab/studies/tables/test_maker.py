"""Makers of tables: their pages show what is kept, and a command makes them in any folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from fedlgm.errors import ConfigError
from fedlgm_lab.studies import files
from fedlgm_lab.studies.tables import maker
from fedlgm_lab.studies.tables.titles import TITLES

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "docs" / "results"
SLOW = {"noise-response"}
PICTURES = {picture: name for name in TITLES for picture in maker.load(name).pictures}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TITLES]
)
def test_the_pages_show_what_is_kept(name: str) -> None:
    made, shown = maker.load(name), 0
    store = made.open(RESULTS)
    if name == "plain-federation":
        pytest.skip("its runs were not kept")
    for page, parts in made.texts(store).items():
        text = maker.place(RESULTS, page).read_text(encoding="utf-8")
        for part, table in parts.items():
            if table:
                assert text.count(f"<!-- {part} -->") == 2, part
                assert text.split(f"<!-- {part} -->")[1].strip() == table.strip(), (
                    f"fedlgm study {name} --out docs/results"
                )
                shown += 1
    assert shown or made.pictures


@pytest.mark.parametrize("name", [name for name in TITLES if maker.load(name).partial])
def test_nothing_is_shown_of_an_empty_folder(name: str, tmp_path: Path) -> None:
    """Tables of what is not measured would be wrong, or end in a traceback."""
    made = maker.load(name)
    texts = made.texts(made.open(tmp_path))
    assert not any(
        re.search(r"\d ± |nan", text) for parts in texts.values() for text in parts.values()
    )


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_drawn_again_from_what_is_kept(picture: str, tmp_path: Path) -> None:
    made = maker.load(PICTURES[picture])
    made.pictures[picture](made.open(RESULTS), tmp_path / "again.png")
    again, before = (image.imread(path) for path in (tmp_path / "again.png", RESULTS / picture))
    assert again.shape == before.shape
    # Text may be drawn otherwise by another version of matplotlib.
    assert np.abs(again - before).mean() < 0.01


def test_pages_show_no_other_picture() -> None:
    drawn = {
        str(path.relative_to(RESULTS))
        for kind in ("png", "svg")
        for path in RESULTS.rglob(f"*.{kind}")
    }
    assert drawn == set(PICTURES)
    shown = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                shown.add(str((page.parent / target).resolve().relative_to(RESULTS)))
    assert shown == drawn


def test_every_table_of_a_paper_that_a_maker_makes_can_be_asked_for() -> None:
    makers = {name: files.maker_of(name) for name in files.elsewhere()}
    assert {makers["000-table-1"], makers["002-table-7"], makers["003-table-3"]} == {
        "allocation-shares",
        "lm-dp-sgd-steps",
        "inid",
    }
    for name, other in files.elsewhere().items():
        command = other.command.split()
        if command[:2] == ["fedlgm", "study"]:
            assert command[2] in TITLES or command[2] in files.names(), name
    assert not set(TITLES) & {*files.names(), *files.elsewhere()}


def test_the_command_measures_shows_and_continues(run, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    status, out, err = run("study", "000-table-1", "--out", folder)
    assert status == 0, err
    assert "| snr-consistent |" in out
    page = (folder / "allocations.md").read_text(encoding="utf-8")
    assert page.count("<!-- shares -->") == 2
    assert "| snr-consistent |" in page
    kept = (folder / "allocation-shares.json").read_bytes()
    assert kept == (RESULTS / "allocation-shares.json").read_bytes()
    status, out, _ = run("study", "allocation-shares", "--out", folder, "--json")
    assert (status, json.loads(out)["complete"]) == (0, True)
    assert (folder / "allocation-shares.json").read_bytes() == kept
    assert (folder / "allocations.md").read_text(encoding="utf-8") == page


def test_without_time_nothing_is_measured(run, tmp_path: Path) -> None:
    status, out, _ = run("study", "false-alarms", "--out", tmp_path / "new", "--set", "minutes=0")
    assert status == 0
    assert "the same command continues" in out
    assert not (tmp_path / "new" / "false-alarms.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inid", "--quick"), "inid is not a grid of runs: it takes only --set, --out and --json"),
        (("inid", "--set", "base=x"), "--set base: this table takes minutes"),
        (("adapters",), "adapters needs --set base=...: the file of fedlgm pretrain"),
        (("cut-votes",), "fedlgm study water-filling"),
        (("neighbouring-rates",), "fedlgm study noise-and-split"),
        (("inidd",), "did you mean 'inid'"),
        (("inid", "--set", "minutes=few"), "--set minutes takes a number, got 'few'"),
        (("outcomes",), "keeps no outcomes: --set keep=runs/study-NAME"),
    ],
)
def test_what_cannot_be_made_is_refused(run, arguments, message, tmp_path: Path) -> None:
    status, _, err = run("study", *arguments, "--out", tmp_path / "new")
    assert (status, err.startswith("error: ")) == (2, True)
    assert message in " ".join(err.split())
    assert not (tmp_path / "new").exists()


def test_a_maker_that_is_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="no table 'inix'"):
        maker.load("inix")
