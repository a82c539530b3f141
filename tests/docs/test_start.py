"""The pages by user: short, linked from the README, and executed."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedlgm import privacy
from simulations.cli import app

ROOT = Path(__file__).parents[2]
PAGES = {
    page.stem: page.read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs" / "start").glob("*.md"))
}
CONTINUED = {"hospitals": "tables", "hugging-face": "hugging-face"}
"""Pages whose code runs with the how-to page that continues it, see `test_how_to.py`."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SCREEN = 50
"""Lines that a window of 1,080 pixels shows."""


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_on_one_screen_and_is_linked_where_readers_begin(page: str) -> None:
    assert len(PAGES[page].splitlines()) <= SCREEN
    assert re.match(r"# I have (an?|tables) ", PAGES[page])
    for table, link in (
        ("README.md", f"docs/start/{page}.md"),
        ("docs/index.md", f"start/{page}.md"),
    ):
        assert f"]({link})" in (ROOT / table).read_text(encoding="utf-8")
    for block in (body for _, body in BLOCK.findall(PAGES[page])):
        assert max(map(len, block.splitlines())) <= 130


def test_the_readme_has_the_measured_sizes_and_installs_the_cpu_build_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "docs/results/install-sizes.json").read_text(encoding="utf-8"))
    for row in (rows[0], rows[-1]):
        assert f"{row['megabytes'] / 1000:.1f} GB" in text
    assert (
        0
        < text.index("https://download.pytorch.org/whl/cpu")
        < text.index("-c constraints.txt '.[all]'")
    )
    for said in ("macOS on Apple silicon", "on Windows use WSL", "compiler is optional"):
        assert said in " ".join(text.split())


def test_all_seven_are_there() -> None:
    assert set(PAGES) == {
        "pytorch",
        "hugging-face",
        "flower",
        "hospitals",
        "opacus",
        "ray",
        "paper",
    }


def test_the_code_of_the_pytorch_page_is_the_readmes() -> None:
    """`test_api.py` runs it."""
    ((_, code),) = BLOCK.findall(PAGES["pytorch"])
    assert code == (ROOT / "docs" / "examples" / "own_model.py").read_text(encoding="utf-8")
    assert code in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readers_without_the_built_site_see_the_code() -> None:
    """Pages that the README links to are read as they are; only the site fills in `--8<--`."""
    assert not [page for page, text in PAGES.items() if "--8<--" in text]


def test_the_figures_of_the_opacus_page_are_those_of_both_accountants() -> None:
    from opacus.accountants import RDPAccountant

    settings = {"sampling_rate": 1 / 32, "steps": 64}
    accountant = RDPAccountant()
    accountant.history = [(0.60944, 1 / 32, 64)]
    figures = (
        accountant.get_epsilon(1e-5),
        privacy.epsilon(0.60944, 1e-5, accountant="rdp", **settings),
        privacy.epsilon(0.60944, 1e-5, **settings),
    )
    for figure in figures:
        assert f"{figure:.3f}" in PAGES["opacus"]


def test_the_code_of_the_opacus_page_keeps_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, code),) = BLOCK.findall(PAGES["opacus"])
    namespace: dict[str, Any] = {}
    exec(compile(code, "opacus.md", "exec"), namespace)
    assert 7 < namespace["trained"].epsilon <= 8
    assert namespace["trained"].guarantee.status == "proven"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["paper", "ray"])
def test_the_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed; the page on Ray without a cluster, whose equality with one is
    `test_cluster.py`'s."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block for kind, block in BLOCK.findall(PAGES[page]) if kind == "python"]
    if page == "ray":
        assert code.count('engine="ray"') == 1
        code = code.replace('engine="ray"', 'engine="local"')
    Path("page.py").write_text(code, encoding="utf-8")
    runpy.run_path("page.py", run_name="__main__")


@pytest.mark.parametrize("page", CONTINUED)
def test_a_page_without_a_run_here_is_run_by_the_page_that_continues_it(page: str) -> None:
    text = (ROOT / "docs" / "how-to" / f"{CONTINUED[page]}.md").read_text(encoding="utf-8")
    assert re.match(rf"# .*\n\nThis page continues \[.*?\]\(\.\./start/{page}\.md\)", text)


def test_the_changes_of_a_flower_app_are_those_of_the_tested_apps() -> None:
    """`tests/strategies/test_flower_apps.py` runs apps with them, and `test_packaging.py` runs the
    page's command."""
    tested = (ROOT / "tests" / "strategies" / "test_flower_apps.py").read_text(encoding="utf-8")
    for kind, code in BLOCK.findall(PAGES["flower"]):
        for line in code.splitlines() if kind == "diff" else ():
            if "import" in line or line.startswith("-app") or line.startswith("+app"):
                assert line[1:].split("  #")[0].strip() in tested, line
    folder = re.search(r"flwr run (\S+)", PAGES["flower"])
    assert folder is not None
    assert (ROOT / folder[1] / "pyproject.toml").is_file()


@pytest.mark.slow
def test_the_commands_of_the_paper_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As printed, but for two rounds."""
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(line) for line in re.findall(r"^    fedlgm (.*)$", PAGES["paper"], re.MULTILINE)
    ]
    assert [command[0] for command in commands] == ["study", "study"]
    for command in commands:
        short = [] if "--list" in command else ["--set", "federation.rounds=2"]
        done = CliRunner().invoke(app, [*command, *short], catch_exceptions=False)
        assert done.exit_code == 0, (command, done.output)
