"""Types of a search's values, as they are printed and stored."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from fedlgm.privacy.selection import Law


class SearchTerms(TypedDict):
    """The public terms of a search, which are fixed before its first run.

    Attributes:
        recipe: name of the recipe.
        search: values by key, from which every run draws a combination.
        expected_runs: mean of the number of runs.
        law: law of this number.
        score: name of the figure that compares runs, and of its data.
        score_epsilon: epsilon of a single score of the private data; None for the public test set.
        score_noise: standard deviation of the noise in a score.
        delta: delta of both epsilons.
        epsilon: epsilon against readers of the one published model.
        epsilon_all_runs: epsilon against a party that sees the expected number of runs, rounded up.
        epsilon_one_run: epsilon of one run with settings that were not searched, without a score.
        accountant: "rdp", because no other accountant covers a search.
        guarantee: guarantee of the one model, in a sentence.
        noise_reproducible: whether a seed makes the number of runs, their order and their noise
            predictable, so that nothing is protected.
        protects: unit and relation.
    """

    recipe: str
    search: dict[str, list[Any]]
    expected_runs: float
    law: Law
    score: str
    score_epsilon: float | None
    score_noise: float
    delta: float
    epsilon: float
    epsilon_all_runs: float
    epsilon_one_run: float
    accountant: str
    guarantee: str
    noise_reproducible: bool
    protects: str


class SearchResult(SearchTerms):
    """A finished search, whose values are public.

    Attributes:
        folder: folder of the search.
        settings: the winning values, by key; missing if there is no model.
        published_score: the winning score of the private data, with its noise. On average it is too
            high, because it is the best of all scores.
        metrics: figures of the published model on the test set.
        model_sha256: hash of the published model.
    """

    folder: str
    settings: NotRequired[dict[str, Any]]
    metrics: NotRequired[dict[str, float]]
    published_score: NotRequired[float]
    model_sha256: NotRequired[str]
