"""The code is no larger than docs/decisions/sizes.md says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fedlgm.package_conflicts import PACKAGES

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `([a-z_/]+)/` \| ([0-9.]+) \|", re.MULTILINE)
STATED = dict(ROW.findall((ROOT / "docs/decisions/sizes.md").read_text(encoding="utf-8")))
SMALLEST = 40  # nodes: a folder with less has no row


@cache
def size(folder: Path) -> int:
    """Nodes of the syntax trees of a folder's own files, without docstrings."""
    return sum(
        nodes_of(ast.parse(file.read_text(encoding="utf-8"))) for file in folder.glob("*.py")
    )


def nodes_of(tree: ast.Module) -> int:
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    documented = (
        node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return len(nodes) - 2 * sum(ast.get_docstring(node) is not None for node in documented)


def folders() -> list[str]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted({file.parent.relative_to(ROOT).as_posix() for file in files})


def test_every_folder_has_a_row() -> None:
    assert {name for name in folders() if size(ROOT / name) >= SMALLEST} == set(STATED)


@pytest.mark.parametrize("name", STATED)
def test_a_folder_is_no_larger_than_its_row_says(name: str) -> None:
    assert size(ROOT / name) <= 1.03 * 1000 * float(STATED[name]) + 50
