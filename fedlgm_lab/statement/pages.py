"""A statement as Markdown for a model card, or as one HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fedlgm_lab import reports
from fedlgm_lab.statement.questions import Answers


def to_markdown(title: str, answers: Answers) -> str:
    """Tables of questions and answers in Markdown."""
    sections = (
        f"### {section}\n\n| | |\n|---|---|\n"
        + "\n".join(f"| {_cell(question)} | {_cell(answer)} |" for question, answer in rows)
        for section, rows in answers.items()
    )
    return f"## {_cell(title)}\n\n" + "\n\n".join(sections) + "\n"


def to_html(title: str, answers: Answers) -> str:
    """One self-contained page."""
    style = (Path(reports.__file__).parent / "style.css").read_text(encoding="utf-8")
    sections = "\n".join(
        f"<section><h2>{escape(section)}</h2><dl class='facts'>"
        + "".join(
            f"<dt>{escape(question)}</dt><dd>{escape(answer)}</dd>" for question, answer in rows
        )
        + "</dl></section>"
        for section, rows in answers.items()
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>"
        f"<header><h1>{escape(title)}</h1></header>\n<main>{sections}</main></body></html>\n"
    )


def _cell(text: str) -> str:
    """Text of a cell, in which no character is markup."""
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text
