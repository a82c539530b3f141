"""Shows the examples of docstrings as code on the API pages, with or without a heading
"Example:".
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1[^\s].*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Examples of a docstring as fenced code."""
    return EXAMPLE.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)


class DoctestBlocks(griffe.Extension):
    """Fences the examples of every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
