"""Questions that an evaluator asks about a run, with the answers from the run's statement.

The questions follow the layers of NIST SP 800-226 (2025): the guarantee and its parameters, the
mechanisms and their composition, the assumptions, and the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlgm.privacy.attackers import percent
from simulations.summaries.terminal import number

Answers = dict[str, list[tuple[str, str]]]
"""Questions with their answers, by section."""

_NOT_STATED = "not stated"


def answer_questions(statement: Mapping[str, Any]) -> Answers:
    """Answer an evaluator's questions on a run, by section.

    Args:
        statement: the run's statement (see `simulations.runs.rows.Statement`).
    """
    return {
        "What is protected": _protected(statement),
        "How strongly": _strength(statement),
        "By which releases": _releases(statement),
        "On which assumptions": _assumptions(statement),
        "Which data, and who answers for them": _people(statement),
    }


def _protected(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("Unit of privacy", f"one {told['unit']}"),
        ("Neighbouring data", f"{told['relation']} of one {told['unit']}"),
        ("Trust model", f"{told['trust']}: {told['noise_added_by']}"),
        ("Guarantee", told["guarantee"]),
        ("What is released", told["released"]),
    ]


def _strength(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    unit, rates = told["unit"], told["attack_rates"]
    found = ", ".join(
        f"{percent(rate)} at {100 * float(share):g} %" for share, rate in rates["tpr"].items()
    )
    groups = "; ".join(
        f"{count} {unit}s: {percent(figures['tpr']['0.01'])}"
        for count, figures in told["groups"].items()
    )
    mu = (
        "none: no Gaussian release covers the run's privacy profile"
        if rates["mu"] is None
        else f"{rates['mu']:.3f}"
    )
    claim = f"epsilon {number(told['claimed_epsilon'])}, as the method's authors count"
    return [
        ("Proven", f"epsilon {number(told['epsilon'])} at delta {told['delta']:g}"),
        ("Claimed", claim),
        ("In words", told["attack"]),
        (f"Most {unit}s found, at a share of false alarms", found),
        ("Advantage of every attack", f"at most {percent(rates['advantage'])}"),
        ("The same for several units together, at 1 % false alarms", groups),
        ("mu of the Gaussian release that covers the run", mu),
    ]


def _releases(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    cap = told["max_participations"]
    charged = "; ".join(
        f"{release['count']} with noise {release['noise']}, sampling: {release['sampling']}"
        for release in told["releases"]
    )
    return [
        (
            "Sampling",
            f"{told['sampling']}, {told['rate']:g} of {told['population']:,} participants a round",
        ),
        ("Cap on one participant's rounds", "none" if cap is None else str(cap)),
        ("Rounds", f"{told['rounds_done']} of {told['rounds_planned']} planned"),
        ("Charged releases", charged or "none"),
        ("Releases of earlier runs on the same data, included", str(told["earlier_releases"])),
        ("Composition", f"{told['accountant'].upper()}: {told['accounting']}"),
        ("Search of settings", told["searched"]),
    ]


def _assumptions(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    secret = "anyone can draw the noise again" if told["noise_reproducible"] else "secret"
    audit = "not audited"
    if "audited_epsilon" in told:
        audit = f"epsilon at least {number(told['audited_epsilon'])}, {told['audit']}"
    return [
        ("Noise", f"drawn from {told['noise_generator']}: {secret}"),
        ("Floating point", told["floating_point"]),
        ("Audit", audit),
        *((("Not covered", text)) for text in told["outside"]),
    ]


def _people(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    keys = ("purpose", "responsible", "data_period", "license")
    return [(key.replace("_", " ").capitalize(), told.get(key, _NOT_STATED)) for key in keys]


def registry_row(statement: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Make an entry for the Differential Privacy Deployments Registry (registry.opendp.org) from a
    statement; fields that the statement does not determine are None.

    Args:
        statement: the run's statement.
        name: name of the product.
    """
    return {
        "product": name,
        "description": statement.get("purpose"),
        "curator": statement.get("responsible"),
        "year": None,
        "flavor": "Approximate DP",
        "unit": f"{statement['unit']}-level",
        "epsilon": statement["epsilon"],
        "delta": statement["delta"],
        "model": statement["trust"].capitalize(),
        "accounting": statement["accounting"],
        "implementation": "fedlgm",
    }
