"""Plans without the data: what is believed of it is said, and checked by the run."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from PIL import Image
from rich.console import Console

from fedlgm.errors import DataError
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.summaries.planning import plan_report
from simulations.summaries.terminal import plan_table


def plain(shown: object) -> str:
    """What a terminal shows, its lines joined."""
    console = Console(record=True, width=100, file=StringIO())
    console.print(shown)
    return re.sub(r"\s+", " ", console.export_text())


@pytest.mark.slow
def test_plans_of_a_folder_of_images_go_by_the_stated_number_and_runs_check_it(tmp_path):
    small = [
        "model.name=cnn-small",
        "data.image_size=16",
        "federation.rounds=20",
        "privacy.accountant=rdp",
    ]
    recipe = recipes.load("lm-dp-sgd-celeba", small)
    report = plan_report(recipe)
    assert "of 162770 examples (expected batch 1628" in report["sampling"]
    assert report["stated"].startswith(
        "162,770 training examples, as the recipe states (data.train_images = 162770)"
    )
    assert report["stated"] in plain(plan_table(report))
    for i in range(10):
        (tmp_path / "faces").mkdir(exist_ok=True)
        Image.new("RGB", (16, 16), (20 * i, 0, 0)).save(tmp_path / "faces" / f"{i}.png")
    rows = "\n".join(f"{i}.png,{i % 2}" for i in range(10))
    (tmp_path / "faces" / "labels.csv").write_text(f"file,Smiling\n{rows}")
    here = [*small, f"data.dir={tmp_path / 'faces'}", "training.batch_size=2"]
    with pytest.raises(
        DataError, match=r"data\.train_images = 162770, but .*faces has 8 training images"
    ):
        Assembly(recipes.load("lm-dp-sgd-celeba", here)).check()
    fitting = recipes.load("lm-dp-sgd-celeba", [*here, "data.train_images=8"])
    assembly = Assembly(fitting)
    assembly.check()
    report = plan_report(fitting)
    assert (
        report["noise_multiplier"],
        f"of {assembly.privacy.facts.sampling.population} examples" in report["sampling"],
    ) == (
        assembly.privacy.facts.noise_multiplier,
        True,
    )
    unstated = plan_report(recipes.load("lm-dp-sgd-celeba", [*here, "data.train_images=none"]))
    assert "stated" not in unstated
    assert unstated["noise_multiplier"] == report["noise_multiplier"]
    without = recipes.load("lm-dp-sgd-celeba", [*small, "data.train_images=none"])
    with pytest.raises(
        DataError,
        match=r"needs data\.dir, a folder of images: it is not set; for a plan, .*train_images",
    ):
        plan_report(without)


def test_an_accountant_without_a_bound_says_so_in_words():
    """An infinite figure is kept for releases that are not private."""
    shown = plain(plan_table(plan_report(recipes.load("distributed-digits"))))
    assert (
        "epsilon (PLD) this accountant has no bound for these releases epsilon (RDP) 8 at delta "
        "1e-05" in shown
    )
    published = plain(plan_table(plan_report(recipes.load("ladp-fashion-mnist-published"))))
    assert "epsilon (PLD) inf at delta 0.02 epsilon (RDP) inf at delta 0.02" in published


def test_options_of_a_folder_of_images_fall_away_with_it():
    other = recipes.load("lm-dp-sgd-celeba", ["data.name=fashion-mnist", "model.name=cnn"])
    assert other.data.reading == {}
    half = recipes.load("lm-dp-sgd-celeba", ["data.name=image-folder/private"])
    assert (half.data.attribute, half.data.train_images) == ("Smiling", 162_770)
