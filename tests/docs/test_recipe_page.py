"""The page of a recipe's keys has all of them, with their defaults and the values that they may
hold."""

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from simulations.config.named_sections import _OpenSection
from simulations.config.recipe import Recipe
from simulations.config.sections import Section

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api" / "recipe.md").read_text()
SECTIONS = [name for name, field in Recipe.model_fields.items() if name not in ("name", "title")]


def model_of(section: str) -> type[Section] | type[_OpenSection]:
    annotation = Recipe.model_fields[section].annotation
    kinds = (annotation, *get_args(annotation))
    return next(
        kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, (Section, _OpenSection))
    )


def rows_of(section: str) -> dict[str, list[str]]:
    """Key -> the other cells of its row."""
    text = PAGE.split(f"\n## [{section}]\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {key: row[1:] for row in rows for key in re.findall(r"`(\w+)`", row[0])}


def shown(value: Any) -> str:
    return (
        "none" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def words_of(annotation: Any) -> set[str]:
    """The names among which a value has to be."""
    if get_origin(annotation) is Literal:
        return {word for word in get_args(annotation) if isinstance(word, str)}
    return set().union(*map(words_of, get_args(annotation))) if get_args(annotation) else set()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_there_with_its_default(section: str) -> None:
    rows, fields = rows_of(section), model_of(section).model_fields
    assert list(rows) == list(fields)
    for key, field in fields.items():
        assert rows[key][0] == ("required" if field.is_required() else shown(field.default)), key
        missing = words_of(field.annotation) - set(re.findall(r"`([\w-]+)`", rows[key][1]))
        assert not missing or key == "channels", f"{key}: {missing}"


def test_the_example_is_a_recipe(tmp_path: Path) -> None:
    from simulations.config import recipe as recipes

    example = (DOCS / "how-to" / "recipe.md").read_text().split("```toml\n")[1].split("```")[0]
    (tmp_path / "mine.toml").write_text(example)
    parsed = recipes.load(tmp_path / "mine.toml")
    assert parsed.mechanism.name == tomllib.loads(example)["mechanism"]["name"]
    assert parsed.privacy.epsilon == 3.0
