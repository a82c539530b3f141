"""A run that a user's callback ends."""

from __future__ import annotations


class Interrupted(Exception):
    """What a user's callback may raise."""


def interrupt_at(round_):
    def on_round(row):
        if row["round"] == round_:
            raise Interrupted

    return on_round
