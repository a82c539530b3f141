"""The mod in front of an existing app: what of the app leaves the client."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, Metadata, RecordDict

from clients import PrivateUpdates
from fedlgm import mechanisms, wire
from fedlgm.errors import RunError
from fedlgm.facts import RunFacts, Sampling
from fedlgm.layers import LayerTable

MODEL = torch.nn.Linear(3, 2)
LAYERS = LayerTable.from_module(MODEL)
PLAN = mechanisms.get("snr-consistent").plan(LAYERS, RunFacts(1.0, Sampling("poisson", 4, 1.0)), None)
HERE = Context(1, 7, {wire.PARTITION: 2, wire.PARTITIONS: 4}, RecordDict(), {})


def question() -> Message:
    config = ConfigRecord({wire.ROUND: 1, wire.CLIENTS: [2], wire.PLAN: PLAN.to_json()})
    arrays = ArrayRecord({wire.MODEL: Array(np.zeros(LAYERS.size, dtype=np.float32))})
    metadata = Metadata(1, "q", 1, 7, "", "1", 0.0, 9e9, MessageType.TRAIN)
    return Message(content=RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config}), metadata=metadata)


def test_a_bounded_update_leaves():
    def app(message: Message, context: Context) -> Message:
        state = {name: value + 100 for name, value in message.content["arrays"].to_torch_state_dict().items()}
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    reply = PrivateUpdates(MODEL)(question(), HERE, app)
    assert set(reply.content) == {wire.ARRAYS, wire.METRICS}
    assert 0 < np.linalg.norm(reply.content[wire.ARRAYS][wire.SUM].numpy()) <= np.linalg.norm(PLAN.clip) * (1 + 1e-6)


@pytest.mark.parametrize("how", ["raised", "returned"])
def test_what_the_app_says_of_a_failure_stays_on_the_client(how, caplog):
    """Flower sends the text of an exception, or of an error that is returned, to the server as it is."""

    def app(message: Message, context: Context) -> Message:
        if how == "raised":
            raise KeyError("patient 4711")
        return Message(Error(0, "patient 4711"), reply_to=message)

    with caplog.at_level(logging.ERROR), pytest.raises(RunError) as failure:
        PrivateUpdates(MODEL)(question(), HERE, app)
    assert str(failure.value) == "this client's app failed: the log of its node says why"
    assert "4711" in (str(failure.value.__cause__) if how == "raised" else caplog.text)
