"""The strategy of published variants that are NOT PRIVATE: it reads figures of the clients to which
no noise is added.

>>> from fedlgm import mechanisms
>>> from strategies import strategy_class
>>> strategy_class(mechanisms.get("ladp", variant="published", threshold=1.0)).__name__
'PublishedFedAvg'
"""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid
from typing_extensions import override

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.mechanisms import BoundsExamples, UsesPrivateNorms, UsesPrivateUpdates
from fedlgm.planning.plan import ReleasePlan
from strategies.layerwise import LayerwiseFedAvg, Pending
from strategies.replies import in_order


class PublishedFedAvg(LayerwiseFedAvg):
    """`LayerwiseFedAvg` for a mechanism that plans from private data. NOT PRIVATE."""

    plans_from_private_data = True

    @override
    def _plan(
        self, round_: int, cut: list[np.ndarray], arrays: ArrayRecord, grid: Grid
    ) -> ReleasePlan:
        """Make the round's plan. If the mechanism plans from raw layer norms, first ask the cohort
        for these norms.
        """
        mechanism, layers = self.method.mechanism, self.method.layers
        common = super()._plan(round_, cut, arrays, grid)
        if not isinstance(mechanism, UsesPrivateNorms):
            return common
        extra = {wire.PLAN: common.to_json()}  # from it clients know how to sample examples
        sent = self._messages(grid, cut, round_, arrays, wire.TRAIN_NORMS, extra)
        messages = [request.message for request in sent if request.message is not None]
        replies = grid.send_and_receive(messages, timeout=self.nodes.round_timeout)
        examples = isinstance(mechanism, BoundsExamples)  # each row is then of one example
        rows = [
            norms
            for request, reply in in_order(sent, replies, self.nodes.single, [])
            if reply is not None
            and (norms := _norms(reply, None if examples else len(request.clients), len(layers)))
            is not None
        ]
        norms = np.concatenate(rows) if rows else np.ones((1, len(layers)))
        return self.method.plan_from_private_norms(norms)

    @override
    def _read_more(self, reply: Message, clients: int, pending: Pending) -> None:
        if not isinstance(self.method.mechanism, UsesPrivateUpdates):
            return
        arrays = reply.content.array_records.get(wire.ARRAYS) or ArrayRecord()
        for name in (key for key in arrays if str(key).startswith(wire.NOTE)):
            try:
                values = wire.view(arrays[name].data)
            except RunError:
                continue
            if values.shape == (clients, len(self.method.layers)) and np.issubdtype(
                values.dtype, np.floating
            ):
                pending.notes.setdefault(str(name).removeprefix(wire.NOTE), []).append(values)


def _norms(reply: Message, count: int | None, layers: int) -> np.ndarray | None:
    """Read the raw layer norms [count, K] in a reply. If `count` is None, any number of rows is
    allowed. The result is None if the reply does not contain such norms.
    """
    try:
        rows = wire.view(reply.content.array_records[wire.ARRAYS][wire.NORMS].data)
    except (KeyError, RunError, AttributeError):
        return None
    if rows.shape != (len(rows) if count is None else count, layers) or not np.issubdtype(
        rows.dtype, np.floating
    ):
        return None
    return rows if np.isfinite(rows).all() and (rows >= 0).all() else None
