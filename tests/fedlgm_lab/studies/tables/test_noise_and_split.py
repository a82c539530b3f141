"""Studies whose runs are kept: they go on where they were stopped, and their tables say what the
runs gave."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pandas as pd
import pytest

from fedlgm_lab.studies.tables import noise_and_split, runs
from fedlgm_lab.studies.tables.pages import put, spread
from fedlgm_lab.studies.tables.runs import Search
from fedlgm_lab.studies.tables.store import Kept, OutOfTimeError, against, change
from simulations.config import recipe as recipes

GRID = (0.25, 0.5, 1.0, 2.0)
"""Rates of the search of "FashionMNIST, MLP"."""


def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {
        "privacy.accountant": "rdp",
        "federation.clients": 100,
        "federation.rounds": 2,
        "privacy.delta": 1e-3,
        "federation.server_optimizer": "sgd",
    }
    group = {"recipe": "digits", "seeds": [1], "set": tiny}
    group |= {"search": {"grid": [0.5, 1.0], "least": 0.5, "most": 1.0}}
    group |= {"axes": {"noise": noise_and_split.NOISES[:1], "split": ["flat"]}}
    axes = runs.settings(noise_and_split.NAME)["axes"]
    monkeypatch.setattr(runs, "settings", lambda _: {"axes": axes, "groups": [group]})
    file = tmp_path / "kept.json"
    with pytest.raises(OutOfTimeError):
        noise_and_split.MAKER.measure(Kept(file, {"minutes": 0}))
    assert not file.exists()  # no time, no run
    noise_and_split.MAKER.measure(Kept(file))
    rows = json.loads(file.read_text())
    assert [(row["rate"], row["seed"]) for row in rows] == [
        (0.5, 100),
        (1.0, 100),
        (rows[2]["rate"], 1),
    ]
    assert {row["guarantee"] for row in rows} == {"proven"}
    assert all(row["epsilon"] <= recipes.load("digits").privacy.epsilon for row in rows)
    shorter = tmp_path / "shorter.json"
    shorter.write_text(json.dumps(rows[:2]))
    noise_and_split.MAKER.measure(Kept(shorter))
    assert [_figures(row) for row in json.loads(shorter.read_text())] == [
        _figures(row) for row in rows
    ]
    capsys.readouterr()


def _figures(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != "seconds"}


def test_tables_pair_the_seeds(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "none.json")
    both = itertools.product(noise_and_split.NOISES, noise_and_split.SPLITS)
    for at, (noise, split) in enumerate(both):
        named = {"task": "FashionMNIST, MLP", "noise": noise, "split": split}
        for rate in (*GRID, 4.0):
            kept.rows.append({**named, "rate": rate, "final": 50 + rate * (3 - rate), "seed": 100})
        for seed in (1, 2, 3):
            kept.rows.append(
                {
                    **named,
                    "rate": 1.0,
                    "final": 60 + 10 * seed + at + 0.01 * seed * at,
                    "seed": seed,
                }
            )
    shown = [
        make(kept, "FashionMNIST, MLP")
        for make in (noise_and_split.tables, noise_and_split.changes)
    ]
    lines = "\n".join(shown).splitlines()
    assert "Seeds per cell: 3." in lines
    first = noise_and_split.search(kept, "FashionMNIST, MLP").splitlines()[2]
    assert (
        first
        == "| independent, secret Poisson sampling | flat | 50.7 | 51.2 | 52.0 | 52.0 | 46.0 |"
    )
    assert any(
        line.startswith("| independent, secret Poisson sampling | 80.00 ± 10.00 (lr 1)")
        for line in lines
    )
    # Splits differ by one column, noises by four, and a hundredth of it a seed.
    assert any(line.startswith("| uniform | +1.02 | +1.00 to +1.04 |") for line in lines)
    assert any(line.startswith("| blt, public cycle | +12.24 |") for line in lines)
    assert any(line.startswith("| blt, public cycle | +8.16 |") for line in lines)
    assert any(
        line.startswith("| banded, public cycle: SNR-consistent | +1.02 |") for line in lines
    )


def test_span_two_is_compared_with_the_best_fixed_split_and_with_span_eight(tmp_path: Path) -> None:
    task = "FashionMNIST, MLP"
    kept = Kept(tmp_path / "none.json")
    both = [
        (noise, split)
        for group in (noise_and_split.SPLITS, [noise_and_split.NARROW])
        for noise, split in itertools.product(noise_and_split.NOISES, group)
    ]
    for at, (noise, split) in enumerate(both):
        named = {"task": task, "noise": noise, "split": split}
        assert noise_and_split.narrow(kept, task) == ""  # not all cells are there
        for rate in GRID:
            kept.rows.append(
                {**named, "rate": rate, "final": 50 + rate * (2.1 - rate), "seed": 100}
            )
        for seed in (1, 2, 3):
            figure = 90.0 if split == noise_and_split.NARROW else 60.0 + at % 4
            kept.rows.append({**named, "rate": 1.0, "final": figure + seed / 10, "seed": seed})
    header, _, *rows = noise_and_split.narrow(kept, task).splitlines()
    assert len(rows) == len(noise_and_split.NOISES)
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert len(cells) == len(header.split("|")[1:-1])
    assert cells[:4] == [
        "independent, secret Poisson sampling",
        "90.20 ± 0.10 (lr 1)",
        "SNR-consistent",
        "+28.00",
    ]
    assert cells[6] == "+27.00"


def test_a_search_goes_beyond_the_edge_that_is_best() -> None:
    search = Search((0.5, 1.0), 0.125, 4.0)
    assert search.following({0.5: 3.0}) == 1.0
    assert search.chosen({0.5: 3.0}) is None
    assert search.following({0.5: 1.0, 1.0: 2.0}) == 2.0
    assert search.following({0.5: 2.0, 1.0: 1.0}) == 0.25
    assert search.chosen({0.5: 1.0, 1.0: 2.0, 2.0: 1.5}) == 1.0
    assert search.chosen({0.5: 1.0, 1.0: 2.0, 2.0: 3.0, 4.0: 4.0}) == 4.0  # no further than allowed
    losses = Search((0.5, 1.0), 0.5, 1.0, better=-1)
    assert losses.chosen({}) is None
    assert losses.chosen({0.5: 1.0, 1.0: 2.0}) == 0.5


def test_a_cell_without_its_search_has_no_figures(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "none.json")
    assert (
        noise_and_split.tables(kept, "FashionMNIST, MLP")
        == noise_and_split.changes(kept, "FashionMNIST, MLP")
        == ""
    )
    cell, *_ = runs.cells(kept, noise_and_split.NAME)
    assert (cell.rate(), len(cell.figures())) == (None, 0)


def test_a_rate_is_chosen_by_the_mean_over_all_seeds_of_a_search(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "none.json")
    search = Search((0.5, 1.0), 0.5, 1.0, seeds=(100, 101))
    cell = runs.Cell(kept, {}, "digits", {}, (1,), search)
    for rate, seed, final in ((0.5, 100, 3.0), (0.5, 101, 1.0), (1.0, 100, 9.0)):
        kept.rows.append({"rate": rate, "seed": seed, "final": final})
    assert (cell.tried(), cell.rate()) == ({0.5: 2.0}, None)
    kept.rows.append({"rate": 1.0, "seed": 101, "final": -9.0})
    assert cell.rate() == 0.5


def test_p_values_need_three_seeds() -> None:
    one, two = pd.Series({1: 1.0, 2: 1.0, 3: 1.0}), pd.Series({1: 2.0, 2: 3.0, 3: 4.0})
    assert against(one[:1], two[1:]).seeds == 0
    assert change(one[:1], two[1:]) == ["", "", ""]
    assert change(two[:2], one) == ["+1.50", "", ""]
    # Changes 1, 2, 3: t = 2 / (1 / sqrt(3)) with 2 degrees of freedom, whose 97.5 % quantile is
    # 4.303.
    assert change(two, one) == ["+2.00", "-0.48 to +4.48", "0.074"]
    assert (spread([]), spread([1.0]), spread([1.0, 2.0])) == ("", "1.00", "1.50 ± 0.71")


def test_pages_have_room_for_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\nold\n<!-- x -->\nb\n")
    put(page, "x", "new")
    assert page.read_text() == "a\n<!-- x -->\nnew\n<!-- x -->\nb\n"
    put(page, "y", "more")
    assert page.read_text().endswith("b\n\n<!-- y -->\nmore\n<!-- y -->\n")
    page.write_text("<!-- x -->\n")
    with pytest.raises(ValueError, match="twice"):
        put(page, "x", "new")


@pytest.mark.parametrize("maker", ["fashion-mnist", "allocations", "noise-and-budget", "recommend"])
def test_every_cell_is_a_recipe(maker: str, tmp_path: Path) -> None:
    for cell in runs.cells(Kept(tmp_path / "none.json"), maker):
        recipes.load(cell.recipe, cell.changes)
