"""The five steps of a secure sum as questions to a node."""

from __future__ import annotations

from collections.abc import Mapping

from fedlgm.errors import RunError
from fedlgm.planning.distributed_trust import NoisedInShares
from fedlgm.planning.plan import ReleasePlan
from fedlgm_nodes.protocol.messages import Question, canonical, digest, sha256
from fedlgm_nodes.secagg.cohort import Terms

STEPS = ("advertise", "share", "mask", "agree", "unmask")
"""The steps in order. The question "mask" brings the model, and only this step reads a node's data.
If no node drops out, "unmask" follows "mask" at once, without "agree".
"""
AHEAD = {"mask": "advertise", "unmask": "share"}
"""Step -> step of the next round's attempt that the same message may also request, since it does
not need the next round's model.
"""
NO_MODEL = sha256(b"")
"""Placeholder for the model in a question for a round whose model is not known yet."""
WORDS = NoisedInShares.numbers
"""Type of a masked vector."""


def terms_of(question: Question, plan: ReleasePlan) -> Terms:
    """The terms of an attempt, which follow from the question alone. The questions to all nodes of
    an attempt have the same nonce.

    The model is not part of the terms, so that keys and shares can be exchanged before it is known.
    Bounds and noise follow from the plan, so nodes are protected equally even if the server sends
    them different models.

    Args:
        question: the question to any of the nodes.
        plan: the question's parsed plan.

    Raises:
        RunError: the plan's noise is not added in shares, or the question's nonce or numbers do not
            suit an attempt.
    """
    shares = plan.facts.shares
    if shares is None:
        raise RunError("a plan whose noise is not added in shares")
    asked = digest("fedlgm secagg plan", question.plan, canonical(question.work))
    return Terms.of(
        {
            "run": question.run,
            "round": question.round,
            "plan": asked,
            "threshold": shares.threshold,
            "colluders": shares.colluders,
            "size": plan.size,
            "attempt": question.nonce,
        }
    )


def texts(values: Mapping[int, str]) -> dict[str, str]:
    """Texts by client, with the client numbers as strings, because JSON has no other keys."""
    return {str(client): text for client, text in values.items()}
