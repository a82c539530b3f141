"""The combinations of settings that a run refuses, stated in one place. Errors about facts name the
argument, and errors about recipes name the key.

>>> from fedlgm.planning.trust import NOISED_BY
>>> run = Settings("fixed", 0.5, "add-remove", NOISED_BY["central"])
>>> check(run, {"relation": "privacy.relation"})
Traceback (most recent call last):
    ...
fedlgm.errors.ConfigError: privacy.relation must be 'replace-one' for fixed-size sampling: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fedlgm.errors import ConfigError
from fedlgm.planning.trust import NOISED_BY, NoisedBy
from fedlgm.privacy.guarantee import Relation

TURNS = ("poisson", "fixed", "allocation")
"""Sampling schemes under which a client may take part in consecutive rounds."""


class Settings(NamedTuple):
    """The settings that the rules check.

    Attributes:
        scheme: sampling scheme.
        rate: sampling rate.
        relation: neighbouring relation.
        noised_by: trust model.
        noise: name of the correlation over rounds in the settings; empty for independent noise.
        steps: whether clients make example-level steps.
        capped: whether the number of a client's releases is limited.
    """

    scheme: str
    rate: float
    relation: Relation
    noised_by: NoisedBy
    noise: str = ""
    steps: bool = False
    capped: bool = False


class Rule(NamedTuple):
    """One combination that is refused.

    Example:
        >>> from fedlgm.planning.trust import NOISED_BY
        >>> rule = Rule(lambda run: run.rate == 1, "take a lower rate")
        >>> rule.broken(Settings("poisson", 1.0, "add-remove", NOISED_BY["central"]))
        True

    Attributes:
        broken: function that says whether settings have the combination.
        right: the message, which states the right setting. {relation}, {trust}, {sampling} and
            {cap} stand for the settings' names, {who} stands for the trust model, and {clients}
            stands for the trust models under which the clients add the noise.
    """

    broken: Callable[[Settings], bool]
    right: str


RULES = (
    Rule(
        lambda run: run.scheme == "allocation" and run.noised_by.name != "central",
        "{sampling} = 'allocation' needs {trust} = 'central': under {who} trust the rounds of a "
        "client are visible, and secret rounds cost less only if they stay secret",
    ),
    Rule(
        lambda run: run.scheme == "allocation" and bool(run.noise),
        "{sampling} = 'allocation' is proven for independent noise: use it without {noise}, or "
        "'grouped-poisson' with it",
    ),
    Rule(
        lambda run: run.scheme == "allocation" and run.relation == "replace-one",
        "{sampling} = 'allocation' is proven for 'add-remove' and 'zero-out', not for {relation} = "
        "'replace-one'",
    ),
    Rule(
        lambda run: bool(run.noise) and bool(run.noised_by.uncorrelated),
        "{noise} needs {trust} = 'central': under {who} trust {uncorrelated}",
    ),
    Rule(
        lambda run: bool(run.noise) and run.scheme in TURNS,
        "{noise} needs to know how many rounds lie between a client's participations: set "
        "{sampling} to 'cyclic' (fixed groups take turns), 'min-separation' (a fixed cohort, "
        "nobody again too soon) or 'grouped-poisson' (secret draws within groups), not {scheme!r}",
    ),
    Rule(
        lambda run: run.scheme not in TURNS and run.noised_by.uploads_released,
        "{sampling} = {scheme!r} needs {trust} = 'central'; under {who} trust max_participations "
        "counts",
    ),
    # A server that adds the noise does not see which client is in a sum, so it cannot count a
    # client's releases.
    Rule(
        lambda run: run.capped and not run.noised_by.uploads_released,
        "{cap} is for {trust} = {clients}: leave it out here",
    ),
    Rule(
        lambda run: run.steps and not run.noised_by.uploads_released,
        "local steps are noised by the clients: use {trust} = 'local'",
    ),
    # Only the client knows which examples are in a step's batch, and no example influences which
    # clients take part.
    Rule(
        lambda run: (
            not run.steps and run.noised_by.uploads_released and run.relation != "replace-one"
        ),
        "{relation} must be 'replace-one' under {who} trust: participation is visible there",
    ),
    Rule(
        lambda run: (
            not run.steps
            and run.scheme == "fixed"
            and run.rate < 1
            and run.relation != "replace-one"
        ),
        "{relation} must be 'replace-one' for fixed-size sampling: one more client displaces "
        "another",
    ),
    Rule(
        lambda run: (
            not run.steps and run.scheme == "min-separation" and run.relation == "add-remove"
        ),
        "who takes part under minimum separation depends on who else is there: use {relation} = "
        "'zero-out'",
    ),
    Rule(
        lambda run: (
            not run.steps and run.scheme == "grouped-poisson" and run.relation == "replace-one"
        ),
        "grouped Poisson sampling is proven for 'add-remove' and 'zero-out', not for {relation} = "
        "'replace-one'",
    ),
)


def check(run: Settings, names: Mapping[str, str]) -> None:
    """Refuse settings that cannot be combined.

    Args:
        run: the settings.
        names: the caller's names of "relation", "trust", "sampling" and "cap"; default: these
            names, and max_participations for "cap".

    Raises:
        ConfigError: a rule is broken; the message states the first broken rule and its remedy.
    """
    for rule in RULES:
        if rule.broken(run):
            defaults = {
                "relation": "relation",
                "trust": "trust",
                "sampling": "sampling",
                "cap": "max_participations",
            }
            who, uncorrelated = run.noised_by.name, run.noised_by.uncorrelated
            about = {
                "noise": run.noise,
                "scheme": run.scheme,
                "who": who,
                "uncorrelated": uncorrelated,
            }
            about["clients"] = " or ".join(
                repr(name) for name, party in NOISED_BY.items() if party.uploads_released
            )
            raise ConfigError(rule.right.format(**{**defaults, **names, **about}))
