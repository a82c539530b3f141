"""Examples in docstrings are true, and errors are named in them."""

import ast
import builtins
import doctest
import importlib
import inspect
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedlgm import errors
from tests.support.undrawn import without_drawing

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")
LONG = {
    "simulations.api",
    "simulations.exports.export",
    "fedlgm_lab.tune.tune",
    "fedlgm_lab.recommend.recommend",
}
UNDRAWN = {"fedlgm_lab.reports.crate"}  # the pictures are not what its example is about
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
    with without_drawing() if name in UNDRAWN else nullcontext():
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


SECTION = re.compile(r"(Args|Attributes|Raises):")
ENTRY = re.compile(r" {4}\*{0,2}[\w.`]+( \(.*?\))?(, \*{0,2}[\w.`]+| or \w+)*: ")


def broken_entries(docstring):
    """Lines of a section that stand where an entry begins and name none."""
    inside = False
    for line in docstring.splitlines():
        if line and not line.startswith(" "):
            inside = SECTION.fullmatch(line) is not None
        elif inside and re.match(r" {4}\S", line) and not ENTRY.match(line):
            yield line


def test_each_entry_of_a_section_begins_with_its_name():
    broken = [
        (str(file.relative_to(ROOT)), line)
        for package in (*PACKAGES, "benchmarks")
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for line in broken_entries(ast.get_docstring(node) or "")
    ]
    assert broken == [], "indent what continues an entry; one entry a name"


def test_an_entry_without_a_name_is_found():
    docstring = """Sum.

    Args:
        rows, weights: what is summed.
            Weights are positive.
        others of the same length.

    Returns:
        A sum.
    """
    assert list(broken_entries(inspect.cleandoc(docstring))) == ["    others of the same length."]


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


def modules():
    """Modules whose functions have docstrings for callers; those of a command are its help."""
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if parts[-1] != "cli" and not parts[-1].endswith(("_command", "_commands")):
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def public_functions(body, path=()):
    """(path of names, function) of a module or class; a constructor is its class's documentation."""
    constructors = ("__init__", "__post_init__")
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, (*path, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if path and node.name in constructors:
                yield path, node
            elif not node.name.startswith("_"):
                yield (*path, node.name), node


def raised_in(function):
    """Names of the errors that a function's own statements raise, less those that it catches
    itself. An error from a variable or another function has no name: ""."""
    converted = ("refuse_errors(", "self._locked(")
    pending = [(node, frozenset()) for node in function.body]
    while pending:
        node, caught = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).startswith(converted):
            continue
        if isinstance(node, ast.Try):
            types = [handler.type for handler in node.handlers if handler.type]
            inner = caught | {
                name.id for kind in types for name in ast.walk(kind) if isinstance(name, ast.Name)
            }
            pending += [(child, inner) for child in node.body]
            pending += [(child, caught) for child in (*node.handlers, *node.orelse)]
            pending += [(child, caught) for child in node.finalbody]
            continue
        if isinstance(node, ast.Raise) and node.exc:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = kind.id if isinstance(kind, ast.Name) else ""
            name = name if name.lstrip("_")[:1].isupper() else ""
            if not {name, "Exception"} & caught:
                yield name
        pending += [(child, caught) for child in ast.iter_child_nodes(node)]


def unnamed_errors(source, module):
    """Errors that public functions of a module raise and their documentation does not name; that of
    a method without a docstring is the docstring of the class above."""
    for path, function in public_functions(ast.parse(source).body):
        documented = module
        for name in path:
            documented = inspect.getattr_static(documented, name)
        named = {*re.findall(r"\w+", inspect.getdoc(documented) or "")}
        for error in sorted({*raised_in(function)} - {"NotImplementedError"}):
            if not named & (kinds_of(error, module) if error else {"Raises"}):
                yield f"{'.'.join(path)}: {error or 'an error'}"


def kinds_of(error, module):
    """Names of an error and of the errors that it is a kind of."""
    places = (module, errors, builtins)
    found = next((getattr(place, error) for place in places if hasattr(place, error)), None)
    return {error} if found is None else {kind.__name__ for kind in found.__mro__} - {"object"}


@pytest.mark.parametrize("name", modules())
def test_docstrings_name_the_errors_that_their_functions_raise(name):
    module = importlib.import_module(name)
    assert [*unnamed_errors(source_of(name), module)] == []


def test_an_error_that_is_not_named_is_found(tmp_path, monkeypatch):
    source = '''
from fedlgm.errors import ConfigError, DiskError

class Base:
    def work(self):
        """Work.

        Raises:
            ConfigError: it cannot.
        """

    def name(self):
        """The name."""

class Made(Base):
    """A part (ConfigError: it cannot be made)."""

    def __init__(self):
        raise ConfigError("named by the class")

    def work(self):
        raise ConfigError("named above")

    def name(self):
        raise ConfigError("not named above")

def wider():
    """Write (RunError: it cannot)."""
    raise DiskError("a kind of RunError")

def another():
    """Raises ValueError."""
    raise TypeError("another")

def caught():
    """1 or 2."""
    try:
        raise KeyError("caught here")
    except (KeyError, IndexError):
        return 2

def again():
    """Pass on."""
    try:
        caught()
    except KeyError as error:
        raise LookupError from error

def inner():
    """A function."""
    def refuse():
        raise ValueError("by whoever calls it")
    return refuse

def from_elsewhere():
    """Nothing about errors."""
    raise inner()()

def _private():
    raise ValueError
'''
    (tmp_path / "with_errors.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("with_errors")
    assert [*unnamed_errors(source, module)] == [
        "Made.name: ConfigError",
        "another: TypeError",
        "again: LookupError",
        "from_elsewhere: an error",
    ]
