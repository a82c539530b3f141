"""Rules on models that people train have the same seeds and searches."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables import real_models

RESULTS = Path(__file__).parents[4] / "docs" / "results"


@pytest.mark.parametrize("rules", [real_models.RULES, real_models.FILLING], ids=["all", "one"])
def test_every_rule_has_five_seeds_and_the_same_search(rules: tuple[str, ...]) -> None:
    settings = real_models.settings_with_runs(RESULTS, rules)
    assert {"embeddings-gru", "transformer"} <= set(settings)
    for name, setting in settings.items():
        found = Study.read(real_models.kept_at(RESULTS, name, rules))
        searched = found.search.groupby("method")["federation.server_lr"].apply(sorted)
        assert set(searched.index) == {real_models.FLAT, *rules}
        assert all(values == setting["rates"] for values in searched)
        assert (found.search["n"] >= 3).all()
        assert (found.to_frame().groupby("method")["seed"].nunique() == 5).all()
