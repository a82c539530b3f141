"""Examples in docstrings are true."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedlgm", "strategies", "clients", "simulations")
LONG = {"simulations.api", "simulations.reports.export"}  # whole runs


def modules_with_examples():
    files = sorted(
        file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if ">>> " in file.read_text()
    )
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield pytest.param(name, marks=pytest.mark.slow if name in LONG else ())


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_give_what_they_say(name, monkeypatch, tmp_path):
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert tried > 0
    assert failed == 0, "see the output above"


def test_a_wrong_example_is_found():
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1
