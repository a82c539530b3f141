"""Formats a privacy statement as Markdown for a model card, or as an HTML page."""

from __future__ import annotations

from fedlgm_lab.reports import page
from fedlgm_lab.statement.questions import Answers


def to_markdown(title: str, answers: Answers) -> str:
    """Format the questions and answers as tables in Markdown."""
    sections = (
        f"### {section}\n\n| | |\n|---|---|\n"
        + "\n".join(f"| {_cell(question)} | {_cell(answer)} |" for question, answer in rows)
        for section, rows in answers.items()
    )
    return f"## {_cell(title)}\n\n" + "\n\n".join(sections) + "\n"


def to_html(title: str, answers: Answers) -> str:
    """Format the questions and answers as a self-contained HTML page."""
    return page.render("statement.html", title=title, answers=answers)


def _cell(text: str) -> str:
    """Escape a cell's text, so that Markdown takes no character as markup."""
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
