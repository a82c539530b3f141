"""Each use of Flower's private modules is listed with what would replace it."""

from __future__ import annotations

import re

from tests.test_core import ROOT

PRIVATE = re.compile(r"^\s*(?:from|import) flwr\.(?!(?:app|clientapp|serverapp)\b)", re.MULTILINE)
PAGE = ROOT / "docs" / "decisions" / "nodes.md"


def test_one_module_uses_private_modules() -> None:
    packages = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    using = [file for file in files if PRIVATE.search(file.read_text(encoding="utf-8"))]
    assert using == [ROOT / "clients" / "flower_private.py"]


def test_the_page_lists_each_of_its_names() -> None:
    text = (ROOT / "clients" / "flower_private.py").read_text(encoding="utf-8")
    names = set(re.findall(r"^(?:def|class) ([A-Za-z]\w*)", text, re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == names - {"version_problem", "Sleeps"}
