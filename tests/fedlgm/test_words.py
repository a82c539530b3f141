"""A guarantee is words: no code but its own module decides anything by it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")
OWNER = ROOT / "fedlgm" / "privacy" / "guarantee.py"
WORDS = {"status", "unit", "relation", "trust", "reason"}
NAMES = {"guarantee_status"}


def decisions(tree: ast.AST) -> list[ast.expr]:
    """Every expression that decides what is done next."""
    found: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            found.append(node.test)
        elif isinstance(node, ast.Match):
            found.append(node.subject)
        elif isinstance(node, ast.comprehension):
            found += node.ifs
        elif isinstance(node, (ast.Compare, ast.BoolOp)):
            found.append(node)
        elif isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
            found.append(node.slice)  # a table of what to do, by word
    return found


def words_in(expression: ast.expr) -> list[str]:
    """Guarantees' words in an expression: plan.guarantee.unit, guarantee.status,
    result["guarantee_status"]."""
    found = []
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and node.attr in WORDS and names_a_guarantee(node.value):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            compared = node.slice.value == "guarantee" and isinstance(expression, ast.Compare)
            if node.slice.value in NAMES or compared:
                found.append(ast.unparse(node))
    return found


def names_a_guarantee(node: ast.expr) -> bool:
    last = (
        node.attr
        if isinstance(node, ast.Attribute)
        else node.id
        if isinstance(node, ast.Name)
        else ""
    )
    return "guarantee" in last.lower()


def branches(source: str) -> list[str]:
    return sorted(
        {word for expression in decisions(ast.parse(source)) for word in words_in(expression)}
    )


def test_no_code_decides_by_a_guarantees_words():
    paths = sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py") if p != OWNER)
    told = {path: branches(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: words for path, words in told.items() if words} == {}


@pytest.mark.parametrize(
    "source",
    [
        "if plan.guarantee.unit == 'example': clip = False",
        "x = 1 if self.plan.guarantee.status != 'none' else 2",
        "while not guarantee.trust == 'central': pass",
        "y = [p for p in plans if p.guarantee.relation == 'replace-one']",
        "match plan.guarantee.status:\n    case 'none': pass",
        "private = plan.guarantee.status == 'proven' or other",
        "rule = TABLE[plan.guarantee.unit]",
        "if result['guarantee_status'] == 'none': publish()",
        "if 'NOT PRIVATE' in result['guarantee']: pass",
        "own_guarantee = plan.guarantee\nif own_guarantee.status: pass",
    ],
)
def test_such_code_would_be_found(source):
    """Power of the test above."""
    assert branches(source)


def test_showing_them_is_no_decision():
    assert not branches(
        "print(plan.guarantee.status, result['guarantee'], TABLE['x'])\nd = {'s': "
        "plan.guarantee.status}"
    )


RATES = re.compile(
    r"\b(clients|steps|samples|classes|bytes|seconds|ms|at most one( client)?) "
    r"a (client|coordinate|round|sample|step|process|core|number)\b"
)


def test_rates_are_per_something() -> None:
    """The field's word: "steps per round", not "steps a round"."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    told = [
        (path.name, match[0])
        for path in files
        for match in RATES.finditer(path.read_text(encoding="utf-8"))
    ]
    assert told == []
    assert RATES.search("at most 3 steps a round")
