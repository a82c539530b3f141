"""[statement]: what only the people responsible for a run can say about it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from simulations.config.sections import Section


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("must be one line of text")
    return text


Line = Annotated[str, Field(max_length=500), AfterValidator(_one_line)]


class StatementSection(Section):
    """[statement]: lines of the privacy statement that no program can know (see
    `simulations.runs.rows.Statement`).

    `searched` says whether settings were chosen by other runs on the same data, and whether these
    were charged: "none" if there was no search.

    Example:
        >>> StatementSection(purpose="readmission within 30 days", searched="none").license is None
        True
    """

    purpose: Line | None = None
    responsible: Line | None = None
    data_period: Line | None = None
    license: Line | None = None
    searched: Line | None = None
