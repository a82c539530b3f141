"""Pages that state epsilons as results say what these allow an attacker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedlgm.privacy.attackers import percent
from simulations.config import recipe as recipes
from simulations.summaries.planning import plan_report

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "how-to" / "epsilon.md"
ROW = re.compile(
    r"^\| `([\w-]+)` \| ([\d.]+) \| (\w+) \| (.+ %) \| (.+ %) \| (.+ %) \| (.+ %) \|$", re.MULTILINE
)
ROWS = ROW.findall(PAGE.read_text(encoding="utf-8"))
LINK = "../how-to/epsilon.md#the-epsilons-of-the-result-pages"


def test_the_table_is_read() -> None:
    assert len(ROWS) >= 9


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_a_row_is_what_the_recipes_plan_states(row: tuple[str, ...]) -> None:
    name, epsilon, unit, *shares = row
    recipe = recipes.load(name, [f"privacy.epsilon={epsilon}"])
    rates = plan_report(recipe)["attack_rates"]
    stated = [rates["tpr"][share] for share in ("0.1", "0.01", "0.001")]
    assert shares == [percent(share) for share in (*stated, rates["advantage"])]
    assert recipe.unit == unit


@pytest.mark.parametrize(
    "page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem
)
def test_a_page_of_results_with_an_epsilon_links_the_table(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if re.search(r"epsilon (is |= ?)?\d", text):
        assert LINK in text
