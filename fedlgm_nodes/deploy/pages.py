"""The static pages of a node and of a federation, from templates beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2


def render(template: str, facts: dict[str, Any]) -> bytes:
    """A page in UTF-8.

    Args:
        template: name of the template.
        facts: the values to put into the template, by name.
    """
    return _PAGES.get_template(template).render(facts).encode()


def counted(number: int, noun: str) -> str:
    """A number followed by its noun, which is in the plural unless the number is 1.

    >>> counted(1, "release"), counted(2, "release")
    ('1 release', '2 releases')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    undefined=jinja2.StrictUndefined,
)
_PAGES.filters["counted"] = counted
