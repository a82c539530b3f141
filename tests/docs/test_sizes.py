"""The code is no larger than docs/decisions/sizes.md says, and files.md lists its files.

`python -m tests.docs.test_sizes` writes the figures of both pages anew.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from fedlgm.package_conflicts import PACKAGES

ROOT = Path(__file__).parents[2]
SIZES, FILES = ROOT / "docs/decisions/sizes.md", ROOT / "docs/decisions/files.md"
ROW = re.compile(r"^\| `([a-z_/]+)/` \| ([0-9.]+) \|(.*\|) .* \|$", re.MULTILINE)
STATED = {name: stated for name, stated, _ in ROW.findall(SIZES.read_text(encoding="utf-8"))}
SMALLEST = 40  # nodes: a folder or file with less has no row
SENTENCE_END = re.compile(r"(?<!\bal\.)(?<!i\.d\.)(?<!\b[A-Z]\.)(?<=\.)\s+(?=[A-Z])")
LARGE = 350  # nodes: a smaller file is not among a folder's largest
SYSTEM = ("fedlgm", "clients", "strategies", "simulations")


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def size(folder: Path) -> int:
    """Nodes of the syntax trees of a folder's own files, without docstrings."""
    return sum(nodes_of(tree_of(file)) for file in folder.glob("*.py"))


def nodes_of(tree: ast.Module) -> int:
    nodes = [node for node in ast.walk(tree) if not isinstance(node, ast.expr_context)]
    documented = (
        node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return len(nodes) - 2 * sum(ast.get_docstring(node) is not None for node in documented)


def purpose_of(file: Path) -> str:
    """The first sentence of a file's docstring, on one line of a table."""
    paragraph = (ast.get_docstring(tree_of(file)) or "").split("\n\n")[0]
    docstring = " ".join(paragraph.split())
    return SENTENCE_END.split(docstring)[0].rstrip(".").replace("|", "\\|")


def folders() -> list[str]:
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return sorted({file.parent.relative_to(ROOT).as_posix() for file in files})


def listed_files() -> str:
    """The text of files.md with the files of today's code."""
    text = FILES.read_text(encoding="utf-8").split("\n## ")[0]
    for folder in folders():
        sizes = {file: nodes_of(tree_of(file)) for file in sorted((ROOT / folder).glob("*.py"))}
        rows = [
            f"| `{file.name}` | {nodes:,} | {purpose_of(file)} |"
            for file, nodes in sizes.items()
            if nodes >= SMALLEST
        ]
        if rows:
            rows = ["| file | nodes | purpose |", "| --- | --- | --- |", *rows]
            text += f"\n## `{folder}/`\n\n" + "\n".join(rows) + "\n"
    return text


def sizes_of_today(page: str) -> str:
    """The page on sizes with the figures of today's code."""

    def row(match: re.Match[str]) -> str:
        folder = ROOT / match[1]
        sizes = {file.name: nodes_of(tree_of(file)) for file in folder.glob("*.py")}
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(
            f"`{name}` {sizes[name] / 1000:.1f}" for name in largest if sizes[name] >= LARGE
        )
        return f"| `{match[1]}/` | {size(folder) / 1000:.1f} |{match[3]} {shown} |"

    of_package = {
        package: sum(size(ROOT / name) for name in folders() if name.split("/")[0] == package)
        for package in PACKAGES
    }
    system = sum(of_package[package] for package in SYSTEM) / 1000
    nodes, lab = (of_package[package] / 1000 for package in ("fedlgm_nodes", "fedlgm_lab"))
    figures = (
        f"of {system:.1f}, `fedlgm_nodes` of {nodes:.1f} and `fedlgm_lab` of {lab:.1f}. The targets"
    )
    pattern = r"of [\d.]+, `fedlgm_nodes` of [\d.]+ and `fedlgm_lab` of [\d.]+\. The targets"
    return ROW.sub(row, re.sub(pattern, figures, page))


def test_every_folder_has_a_row() -> None:
    assert {name for name in folders() if size(ROOT / name) >= SMALLEST} == set(STATED)


@pytest.mark.parametrize("name", STATED)
def test_a_folder_is_no_larger_than_its_row_says(name: str) -> None:
    assert size(ROOT / name) <= 1.03 * 1000 * float(STATED[name]) + 50


def test_the_list_of_files_is_that_of_the_code() -> None:
    rows = re.compile(r"^(?:## .*|\| `(.*)` \| [\d,]+ \| (.*) \|)$", re.MULTILINE)
    stated = FILES.read_text(encoding="utf-8")
    assert rows.findall(stated) == rows.findall(listed_files()), (
        "python -m tests.docs.test_sizes writes the list anew"
    )


def test_every_file_says_what_it_is_for() -> None:
    files = [file for name in folders() for file in (ROOT / name).glob("*.py")]
    assert [
        file for file in files if nodes_of(tree_of(file)) >= SMALLEST and not purpose_of(file)
    ] == []


if __name__ == "__main__":
    SIZES.write_text(sizes_of_today(SIZES.read_text(encoding="utf-8")), encoding="utf-8")
    FILES.write_text(listed_files(), encoding="utf-8")
