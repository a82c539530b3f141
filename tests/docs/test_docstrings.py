"""Examples in docstrings are true."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")
LONG = {
    "simulations.api",
    "simulations.exports.export",
    "fedlgm_lab.tune.tune",
    "fedlgm_lab.recommend.recommend",
}
NO_CHEAP_EXAMPLE = {
    "fedlgm_lab.attacks.inception.InceptionFeatures": "its weights are not shipped",
    "strategies.layerwise.LayerwiseFedAvg": "a round needs clients on a grid; PrivateFedAvg is the "
    "one that users make",
    "fedlgm.mechanisms.mechanism.PlansFromAnswers": "fedlgm.papers.ladp.client_choice.ClientLaDP is",
    "fedlgm.mechanisms.mechanism.PlansFromPrivateData": "a mark without a method",
    "strategies.layerwise.Pending": "only a round in flight has one",
    "strategies.layerwise.RoundRecord": "only a finished round makes one",
}


def modules_with_examples():
    files = sorted(
        file
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if ">>> " in file.read_text()
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


def documented_modules():
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [
        name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
    ]


def source_of(module):
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def classes_without_example(source):
    """Public classes that no example of their own, of a method or of the module (by name) shows."""
    tree = ast.parse(source)
    by_module = "\n".join(
        re.findall(r"^(?:>>>|\.\.\.) .*$", ast.get_docstring(tree) or "", re.MULTILINE)
    )
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            shown = any(">>> " in (ast.get_docstring(one) or "") for one in (node, *methods))
            if not shown and not re.search(rf"\b{node.name}\b", by_module):
                yield node.name


def test_every_public_class_of_the_api_pages_has_an_example():
    modules = documented_modules()
    assert len(modules) > 50
    assert "fedlgm.planning.plan" in modules
    missing = {
        f"{module}.{name}"
        for module in modules
        for name in classes_without_example(source_of(module))
    }
    assert missing == NO_CHEAP_EXAMPLE.keys(), (
        "give the class an example, or take it off the list of exceptions"
    )


def test_a_class_without_an_example_is_found():
    source = '''"""A module.

>>> Named(1)
Named(1)
"""

class Named:
    """Shown by the module."""

class Own:
    """>>> Own().x"""

class Method:
    """Nothing here."""

    def use(self):
        """>>> Method().use()"""

class Bare:
    """Named in words, not in an example."""

class _Private:
    pass
'''
    assert list(classes_without_example(source)) == ["Bare"]
