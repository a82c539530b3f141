"""The map of rules is what the kept studies give, and so are the sentences under it."""

from __future__ import annotations

from benchmarks import rule_map


def test_the_table_is_what_the_kept_studies_give() -> None:
    text = rule_map.HOW_TO.read_text(encoding="utf-8")
    assert text.split("<!-- map -->")[1].strip() == rule_map.page().strip(), (
        "python -m benchmarks.rule_map"
    )
