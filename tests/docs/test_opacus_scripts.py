"""Scripts in the style of Opacus' examples, and what it takes to run them with fedlgm.

`tests/opacus_scripts` holds each script as an Opacus user has it, and beside it, as `_fedlgm.py`,
the same script with fedlgm."""

from __future__ import annotations

import difflib
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import datasets
import pytest
import torch

from tests.support.data_files import write_mnist

SCRIPTS = Path(__file__).parents[1] / "opacus_scripts"
NAMES = ("digits_cnn", "digits_groupnorm", "names_lstm")
MOST = 10
"""Lines that a user writes; the loop over batches and what belongs to it are deleted."""


def lines_written(name: str) -> int:
    before, after = (
        (SCRIPTS / file).read_text(encoding="utf-8").splitlines()
        for file in (f"{name}.py", f"{name}_fedlgm.py")
    )
    differences = difflib.ndiff(before, after)
    return sum(line.startswith("+ ") and line != "+ " for line in differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_costs_the_same_epsilon_after_at_most_ten_written_lines(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lines_written(name) <= MOST
    monkeypatch.chdir(tmp_path)
    epsilons = []
    for file in (f"{name}.py", f"{name}_fedlgm.py"):
        torch.manual_seed(0)
        with warnings.catch_warnings():  # of Opacus' random generator and hooks
            warnings.simplefilter("ignore")
            runpy.run_path(str(SCRIPTS / file))
        told = re.search(r"epsilon (\S+) at", capsys.readouterr().out)
        assert told is not None
        epsilons.append(float(told[1]))
    assert epsilons[0] == pytest.approx(epsilons[1], abs=0.02)


PATCHES = SCRIPTS / "patches"
"""Patches that make Opacus' own examples, as its source distribution has them, use fedlgm."""
ARGUMENTS = {
    "mnist": "--data-root mnist -n 1 -b 32",
    "char-lstm-classification": "--data-root names --epochs 2 -b 40",
    "imdb": "-n 1 -b 20 -j 0",
}
MOST_OF_ORIGINALS = 15


def written_in(name: str) -> int:
    patch = (PATCHES / f"{name}.patch").read_text(encoding="utf-8")
    return len(re.findall(r"^\+(?!\+)", patch, re.MULTILINE))


def test_opacus_own_examples_take_at_most_fifteen_written_lines() -> None:
    page = (SCRIPTS.parents[1] / "docs" / "start" / "opacus.md").read_text(encoding="utf-8")
    counts = [written_in(name) for name in ARGUMENTS]
    assert max(counts) <= MOST_OF_ORIGINALS
    assert "take {}, {} and {}".format(*counts) in " ".join(page.split())


def example_data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data in the formats that the three examples read."""
    write_mnist(folder / "mnist" / "MNIST" / "raw", train=320)
    (folder / "names").mkdir()
    for language, letters in (("Czech", "xyz"), ("English", "abc")):
        names = [letters[i % 3] * (2 + i % 5) for i in range(150)]
        (folder / "names" / f"{language}.txt").write_text("\n".join(names), encoding="utf-8")
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "bad", "good", "film"]
    (folder / "vocabulary.txt").write_text("\n".join(words), encoding="utf-8")
    tokenizer_class = import_module("transformers").BertTokenizerFast
    tokenizer = tokenizer_class(str(folder / "vocabulary.txt"))
    rows = {"text": ["a good film", "bad film"] * 100, "label": [1, 0] * 100}
    sets = datasets.DatasetDict(
        {part: datasets.Dataset.from_dict(rows) for part in ("train", "test")}
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **named: sets)
    monkeypatch.setattr(tokenizer_class, "from_pretrained", lambda *given, **named: tokenizer)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of examples in the source distribution of the installed Opacus."""
    folder = tmp_path_factory.mktemp("opacus")
    wanted = f"opacus=={version('opacus')}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "opacus"]
    subprocess.run([*command, "--dest", folder, wanted], check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("opacus-*/examples"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_of_opacus_costs_no_more_with_fedlgm(
    name: str,
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The patch applies, and the same noise has at most the epsilon that Opacus prints."""
    monkeypatch.chdir(tmp_path)
    example_data(tmp_path, monkeypatch)
    script = tmp_path / f"{name}.py"
    shutil.copyfile(examples / f"{name}.py", script)
    monkeypatch.setattr(sys, "argv", [str(script), "--device", "cpu", *ARGUMENTS[name].split()])
    epsilons = []
    for patched in (False, True):
        if patched:
            subprocess.run(["git", "apply", "-p0", PATCHES / f"{name}.patch"], check=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(script), run_name="__main__")
        told = re.findall(r"ε = ([\d.]+)", capsys.readouterr().out)
        epsilons.append(float(told[-1]))
    assert epsilons[0] - 0.1 * epsilons[0] <= epsilons[1] <= epsilons[0] + 0.01
