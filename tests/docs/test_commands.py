"""Every `fedlgm` command of a page or a recipe has options that exist, and recipes and keys that
are accepted."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedlgm.errors import DataError
from fedlgm_lab.studies import files
from fedlgm_lab.studies.jobs import grid_jobs, jobs
from fedlgm_lab.studies.study import base_of
from fedlgm_lab.studies.tables import maker
from simulations import pretrain
from simulations.cli import app
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.overrides import settings
from simulations.config.recipe import Recipe
from tests.support.data_files import write_cifar, write_mnist

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECIPES = sorted((ROOT / "simulations" / "recipes").rglob("*.toml"))
_START = re.compile(r"^(?:\$ | *)(?:sudo -u \S+ )?fedlgm (?=[a-z])")
_SHORT = {
    "apply": "",
    "compare": "--seeds 1 --set federation.rounds=1 --set federation.clients=10 --set "
    "model.name=cnn",
    "pretrain": "--steps 1",
    "risk": "--set risk.epochs=1 --set risk.adversary_epochs=1 --set risk.examples=60",
    "simulate": "--set federation.rounds=1 --set federation.rate=0.02",
}
"""Arguments with which a command of a recipe's comments ends soon."""
_RECIPES = {"simulate", "plan", "partition", "compare", "risk"}


def commands(file: Path) -> list[list[str]]:
    """Words of each command in a page's blocks, lines that go on joined."""
    found, block = [], False
    lines = iter(file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines())
    for line in lines:
        block = not block if line.startswith("```") else block
        if (block or line.startswith("    ")) and _START.match(line):
            found.append(shlex.split(_START.sub("", line), comments=True))
    return found


def comments(file: Path) -> list[str]:
    """Lines of a recipe's comments, lines that go on joined."""
    lines = [
        line[1:] for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def recipe_commands(file: Path) -> list[list[str]]:
    """Words of each command in a recipe's comments: on lines of their own, and with arguments in
    backticks."""
    found = []
    for line in comments(file):
        shown = [line] if _START.match(line) else re.findall(r"`(fedlgm \S+ [^`]+)`", line)
        found += [shlex.split(_START.sub("", command), comments=True) for command in shown]
    return found


def check(words: list[str]) -> list[Recipe]:
    """Raise what the command would say of its arguments; the runs that it would make, where it
    makes any."""
    command = typer.main.get_command(app)
    words = words[: words.index("&&")] if "&&" in words else words
    name = ""
    while hasattr(command, "commands"):
        name, words = words[0], words[1:]
        assert name in command.commands, name  # type: ignore[attr-defined]
        command = command.commands[name]  # type: ignore[attr-defined]
    context = command.make_context(name, list(words))
    given = context.params
    if name == "study":
        if given["listed"]:
            return []
        if table := files.maker_of(given["name"]):
            maker.load(table).open(ROOT, dict(settings(given["overrides"] or ())))
            return []
        asked = files.requested_study(
            given["name"], given["grid"] or (), given["search"] or (), given["overrides"] or ()
        )
        base, own, options = base_of(asked.recipe, asked.grid, {}, asked.set)
        return [
            job.recipe
            for job in grid_jobs(base, asked.grid | (asked.search or {}), range(1), options, own)
        ]
    recipe, changes = given.get("recipe") or given.get("target"), given.get("overrides") or []
    bundled = recipe is None or recipe in recipes.names()
    assert bundled or name not in _RECIPES or "." in recipe or "/" in recipe or recipe.isupper(), (
        recipe
    )  # or a file
    if (
        not bundled
        or "overrides" not in given
        or any("own_mechanism" in str(value) for value in given.values())
    ):
        return []
    if name == "compare":
        methods = given["methods"] and given["methods"].split(",")
        made = jobs(
            recipe,
            methods,
            given["seeds"],
            changes,
            given["epsilons"] or (),
            given["partitions"] or (),
        )
        return list({job.method: job.recipe for job in made}.values())  # one run of each method
    return [recipes.load(recipe, changes)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_commands_of_a_page_are_known(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for words in commands(file):
            try:
                check(words)
            except Exception as error:
                raise AssertionError(f"{file.name}: fedlgm {shlex.join(words)}: {error}") from error


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.slow] if "resnet18" in file.stem else [])
        for file in RECIPES
    ],
    ids=lambda file: file.stem,
)
def test_the_commands_of_a_recipe_can_be_planned(file: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for words in recipe_commands(file):
            try:
                runs = check(words)
                for run in (
                    runs if words[0] == "compare" else []
                ):  # other tests plan the recipe as it is
                    Assembly(run, planned=True).privacy.first_plan()
            except Exception as error:
                raise AssertionError(f"{file.name}: fedlgm {shlex.join(words)}: {error}") from error
        for line in comments(file):
            changes = re.findall(r"--set (\S+=[^\s(),]+)", line)
            if changes and "fedlgm" not in line and file.parent.name == "recipes":
                recipes.load(file.stem, [change.rstrip(".;:") for change in changes])


@pytest.fixture
def small_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand-ins of the image sets, less text to pretrain on, and an empty working directory."""
    sets = tmp_path / "sets"
    for folder in ("MNIST/raw", "FashionMNIST/raw"):
        write_mnist(sets / folder, train=400)
    for batch in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        write_cifar(sets / "cifar-10-batches-py" / batch, "labels", 10, n=100)
    for part in ("train", "test"):
        write_cifar(sets / "cifar-100-python" / part, "fine_labels", 100, n=100)
    monkeypatch.setenv("FEDLGM_DATA", str(sets))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    monkeypatch.setattr(pretrain, "docstrings", partial(pretrain.docstrings, 200_000))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_the_page_of_commands_names_every_command() -> None:
    page = (ROOT / "docs" / "how-to" / "command-line.md").read_text(encoding="utf-8")
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in known if not re.search(rf"fedlgm {name}\b", page)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in RECIPES if recipe_commands(file)], ids=lambda file: file.stem
)
def test_the_commands_of_a_recipe_run(file: Path, small_sets: None) -> None:
    if "CELEBA" in file.read_text(encoding="utf-8"):
        pytest.skip("needs CelebA and FFHQ, whose folders its command names")
    for words in recipe_commands(file):
        ended = CliRunner().invoke(app, [*words, *shlex.split(_SHORT[words[0]])])
        if isinstance(ended.exception, DataError) and "not found" in str(ended.exception):
            pytest.skip(str(ended.exception))
        assert ended.exit_code == 0, (
            f"fedlgm {shlex.join(words)}: {ended.output or ended.exception}"
        )


def test_commands_of_recipes_are_found() -> None:
    found = {file.stem: recipe_commands(file) for file in RECIPES}
    assert [words[0] for words in found["ladp-cifar10-resnet18"]] == ["compare", "compare"]
    assert sum(map(len, found.values())) >= 9


def test_commands_are_found_and_wrong_ones_are_noticed() -> None:
    assert sum(len(commands(file)) for file in FILES) > 80
    for wrong in (
        "simulate digitz", "simulate digits --sett x=1", "plan digits --set federation.round=3", "fly",
        "compare digits --methods uniform,gausian", ("compare digits --methods uniform --set "
                                                    "mechanism.budget=matched"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=r"."):
            check(shlex.split(wrong))
