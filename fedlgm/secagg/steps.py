"""The five steps of a secure sum as questions to a node: one signed question names a whole attempt at a round."""

from __future__ import annotations

from fedlgm.errors import RunError
from fedlgm.node_protocol import Question, canonical, digest
from fedlgm.noised_in_shares import NoisedInShares
from fedlgm.plan import ReleasePlan
from fedlgm.secagg.cohort import Terms

STEPS = ("advertise", "share", "mask", "agree", "unmask")
"""In order. The model travels with "mask"; nothing of a node's data is read before it."""
WORDS = NoisedInShares.numbers
"""Type of a masked vector."""


def terms_of(question: Question, plan: ReleasePlan) -> Terms:
    """The terms of an attempt, which follow from the question alone: nodes that are asked together share its nonce.

    Args:
        question: the question to any of the nodes.
        plan: its plan.

    Raises:
        RunError: the plan's noise is not added in shares, or the question has no nonce for an attempt.
    """
    shares = plan.facts.shares
    if shares is None:
        raise RunError("a plan whose noise is not added in shares")
    asked = digest("fedlgm secagg plan", question.plan, question.model, canonical(question.work))
    return Terms.of(
        {
            "run": question.run, "round": question.round, "plan": asked, "threshold": shares.threshold,
            "colluders": shares.colluders, "size": plan.size, "attempt": question.nonce,
        }
    )  # fmt: skip
