"""The table of models that people train is that of the kept runs."""

from __future__ import annotations

from benchmarks import real_models
from benchmarks.recommend import PAGE
from simulations.studies.results import Study


def test_the_page_shows_the_kept_runs() -> None:
    assert real_models.compared() in PAGE.read_text(encoding="utf-8")


def test_every_rule_has_five_seeds_and_the_same_search() -> None:
    for name, setting in real_models.SETTINGS.items():
        found = Study.read(real_models.KEPT / f"{name}.json")
        searched = found.search.groupby("method")["federation.server_lr"].apply(sorted)
        assert set(searched.index) == {real_models.FLAT, *real_models.RULES}
        assert all(values == setting.rates for values in searched)
        assert (found.search["n"] >= 3).all()
        assert (found.to_frame().groupby("method")["seed"].nunique() == 5).all()
