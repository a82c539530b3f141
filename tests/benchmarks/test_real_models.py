"""The table of models that people train is that of the kept runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import adaptive, real_models, recommend
from fedlgm_lab.studies.results import Study

RULES = pytest.mark.parametrize(
    ("rules", "page"),
    [(real_models.RULES, recommend.PAGE), (real_models.FILLING, adaptive.PAGE)],
    ids=["all", "one"],
)


@RULES
def test_the_page_shows_the_kept_runs(rules: tuple[str, ...], page: Path) -> None:
    assert real_models.compared(rules) in page.read_text(encoding="utf-8")


@RULES
def test_every_rule_has_five_seeds_and_the_same_search(rules: tuple[str, ...], page: Path) -> None:
    settings = real_models.measured(rules)
    assert {"embeddings-gru", "transformer"} <= set(settings)
    for name, setting in settings.items():
        found = Study.read(real_models.kept_at(name, rules))
        searched = found.search.groupby("method")["federation.server_lr"].apply(sorted)
        assert set(searched.index) == {real_models.FLAT, *rules}
        assert all(values == setting.rates for values in searched)
        assert (found.search["n"] >= 3).all()
        assert (found.to_frame().groupby("method")["seed"].nunique() == 5).all()
