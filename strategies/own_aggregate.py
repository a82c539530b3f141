"""Trial of a user's `aggregate_train`, before a round is charged."""

from __future__ import annotations

import copy
import io
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, Metadata, MetricRecord, RecordDict

from fedlgm import wire

Strategy = TypeVar("Strategy")


class Unsent(KeyError):
    """Error for a metric that no client sends, when a trial reads this metric."""


class Figures(MetricRecord):
    """Metrics of the reply in a trial, which raise `Unsent` for every metric that no client sends.

    Example:
        >>> Figures({"round": 1})["train_loss"]
        Traceback (most recent call last):
            ...
        strategies.own_aggregate.Unsent: 'train_loss'
    """

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            raise Unsent(key) from None


def copy_strategy(strategy: Strategy) -> Strategy:
    """Copy a strategy, together with its lists, sets and mappings."""
    duplicate = copy.copy(strategy)
    for name, value in vars(strategy).items():
        if isinstance(value, list | dict | set | deque):
            with suppress(Exception):  # a user's object may raise anything
                setattr(duplicate, name, copy.deepcopy(value))
    return duplicate


def unsent_figure(
    aggregate: Callable[[Iterable[Message]], Any], server_round: int, size: int
) -> Unsent | None:
    """Find a metric that a function of replies reads although no client sends it; None if there is
    no such metric.

    All other errors of the function are ignored, because the trial may be their cause.

    Args:
        aggregate: the function, which is called with one reply whose update is zero.
        server_round: number of the round.
        size: length of the update.
    """
    figures = Figures({wire.CLIENT_COUNT: 1, wire.DISCARDED: 0})
    content = RecordDict(
        {wire.ARRAYS: ArrayRecord({wire.SUM: Array(np.zeros(size))}), wire.METRICS: figures}
    )
    metadata = Metadata(
        run_id=1,
        message_id="2",
        src_node_id=2,
        dst_node_id=1,
        reply_to_message_id="1",
        group_id=str(server_round),
        created_at=time.time(),
        ttl=3600.0,
        message_type=MessageType.TRAIN,
    )
    try:
        with redirect_stdout(io.StringIO()):
            aggregate([Message(content=content, metadata=metadata)])  # type: ignore[call-overload]
    except Unsent as error:
        return error
    except Exception:
        return None
    return None
