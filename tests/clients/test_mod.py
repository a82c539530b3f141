"""The mod in front of an existing app: what of the app leaves the client."""

from __future__ import annotations

from unittest import TestCase

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod, message_size_mod

from clients import PrivateClientApp, PrivateUpdates
from clients.consent import Consent
from fedlgm import mechanisms, wire
from fedlgm.errors import ConfigError, Notice, PrivacyError, RunError
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable

MODEL = torch.nn.Linear(3, 2)
LAYERS = LayerTable.from_module(MODEL)
PLAN = mechanisms.get("snr-consistent").plan(
    LAYERS, RunFacts(1.0, Sampling("poisson", 4, 1.0)), None
)
HERE = Context(1, 7, {wire.PARTITION: 2, wire.PARTITIONS: 4}, RecordDict(), {})


def question() -> Message:
    config = ConfigRecord({wire.ROUND: 1, wire.CLIENTS: [2], wire.PLAN: PLAN.to_json()})
    arrays = ArrayRecord({wire.MODEL: Array(np.zeros(LAYERS.size, dtype=np.float32))})
    metadata = Metadata(1, "q", 1, 7, "", "1", 0.0, 9e9, MessageType.TRAIN)
    return Message(
        content=RecordDict({wire.ARRAYS: arrays, wire.CONFIG: config}), metadata=metadata
    )


def test_a_bounded_update_leaves():
    def app(message: Message, context: Context) -> Message:
        state = {
            name: value + 100
            for name, value in message.content["arrays"].to_torch_state_dict().items()
        }
        return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)

    reply = PrivateUpdates(MODEL)(question(), HERE, app)
    assert set(reply.content) == {wire.ARRAYS, wire.METRICS}
    assert (
        0
        < np.linalg.norm(reply.content[wire.ARRAYS][wire.SUM].numpy())
        <= np.linalg.norm(PLAN.clip) * (1 + 1e-6)
    )


@pytest.mark.parametrize("kind", [MessageType.QUERY, MessageType.TRAIN])
@pytest.mark.parametrize(
    "mod", [fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)]
)
def test_mods_of_flowers_own_privacy_behind_ours_are_refused(mod, kind):
    """They are seen in the first message, which is a query: nothing has been charged."""
    private, asked = PrivateUpdates(MODEL), question()
    app = ClientApp(mods=[private, message_size_mod, mod])
    app.query()(private.answer)
    app.train()(lambda message, context: pytest.fail("the app trains"))
    asked.metadata.message_type = kind
    with pytest.raises(ConfigError, match="is a part of Flower's own differential privacy"):
        app(asked, HERE)


def test_other_mods_behind_ours_are_used():
    private, calls = PrivateUpdates(MODEL), []
    app = ClientApp(mods=[private])

    def counts(message, context, call_next):
        calls.append(message.metadata.message_type)
        return call_next(message, context)

    @app.train(mods=[counts, message_size_mod])
    def train(message, context):
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    assert set(app(question(), HERE).content) == {wire.ARRAYS, wire.METRICS}
    assert calls == [MessageType.TRAIN]


@pytest.mark.parametrize(
    "make", [lambda old: PrivateClientApp(old), lambda old: PrivateClientApp(client_fn=old)]
)
def test_an_older_app_is_refused_when_it_is_built_with_the_page_that_converts_it(make):
    with pytest.raises(
        ConfigError, match=r"not client_fn: .*NumPyClient.*flower-app\.md .* 'An older app'"
    ):
        make(lambda context: None)


def test_an_app_that_evaluates_learns_that_this_is_not_called():
    app = PrivateClientApp(MODEL)
    with pytest.warns(Notice, match=r"@app\.evaluate are not called.*start\(evaluate_fn=\.\.\.\)"):

        @app.evaluate()
        def evaluate(message: Message, context: Context) -> Message:
            raise AssertionError


def test_frozen_parameters_reach_the_app_and_are_not_sent():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    seen = {}

    def app(message: Message, context: Context) -> Message:
        seen.update(message.content["arrays"].to_torch_state_dict())
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    layers = LayerTable.from_module(model)
    plan = mechanisms.get("snr-consistent").plan(
        layers, RunFacts(1.0, Sampling("poisson", 4, 1.0)), None
    )
    asked = question()
    asked.content[wire.CONFIG][wire.PLAN] = plan.to_json()
    asked.content[wire.ARRAYS] = ArrayRecord(
        {wire.MODEL: Array(np.zeros(layers.size, dtype=np.float32))}
    )
    reply = PrivateUpdates(model)(asked, HERE, app)
    assert torch.equal(seen["0.weight"], model[0].weight)
    assert reply.content[wire.ARRAYS][wire.SUM].numpy().shape == (6,)


def trained(message: Message, **others) -> Message:
    arrays = {
        name: value + 100 for name, value in message.content["arrays"].to_torch_state_dict().items()
    }
    return Message(RecordDict({"arrays": ArrayRecord(arrays), **others}), reply_to=message)


def raises(message: Message, context: Context) -> Message:
    raise KeyError("patient 4711")


def returns_an_error(message: Message, context: Context) -> Message:
    return Message(Error(0, "patient 4711"), reply_to=message)


def returns_another_shape(message: Message, context: Context) -> Message:
    arrays = ArrayRecord({"weight": torch.zeros(4711, 3), "bias": torch.zeros(2)})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def returns_many_records(message: Message, context: Context) -> Message:
    return Message(
        RecordDict({f"arrays {i}": message.content["arrays"] for i in range(4711)}),
        reply_to=message,
    )


@pytest.mark.parametrize(
    "app", [raises, returns_an_error, returns_another_shape, returns_many_records]
)
def test_what_the_app_says_of_a_failure_stays_on_the_client(app):
    """Flower sends the text of an exception to the server as it is, and writes its cause to the
    node's log."""
    with pytest.raises(RunError) as failure:
        PrivateUpdates(MODEL)(question(), HERE, app)
    assert str(failure.value) == "this client's app failed: the log of its node says why"
    assert "4711" in str(failure.value.__cause__)


@pytest.mark.parametrize("when", ["before", "after"])
def test_so_does_what_its_lifespan_says(when):
    app = PrivateClientApp(MODEL)

    @app.lifespan()
    def lifespan(context: Context):
        if when == "before":
            raise KeyError("patient 4711")
        yield
        raise KeyError("patient 4711")

    app.train()(lambda message, context: trained(message))
    assert (
        app(question(), HERE).error.reason
        == "this client's app failed: the log of its node says why"
    )


def test_nothing_else_of_the_apps_leaves():
    """The reply takes its metadata from the message, which the app could change."""

    def app(message: Message, context: Context) -> Message:
        message.metadata.group_id, message.metadata.ttl = "4711", 4711.0
        return trained(
            message, metrics=MetricRecord({"num-examples": 4711}), notes=ConfigRecord({"ill": 4711})
        )

    asked = question()
    reply = PrivateUpdates(MODEL)(asked, HERE, app)
    assert dict(reply.content[wire.METRICS]) == {wire.CLIENT_COUNT: 1, wire.DISCARDED: 0}
    assert set(reply.content) == {wire.ARRAYS, wire.METRICS}
    assert "4711" not in str(vars(reply.metadata))


@pytest.mark.parametrize("how", ["replaces", "clears", "keeps"])
def test_the_app_cannot_lose_what_the_client_has_spent(how):
    """With another state a client would sign its budget away: fresh keys, and no release on its
    record."""
    facts = RunFacts(2.0, Sampling("poisson", 4, 1.0), "replace-one", "local", rounds=1)
    plan = mechanisms.get("uniform").plan(LAYERS, facts, None)
    context = Context(1, 7, {wire.PARTITION: 2, wire.PARTITIONS: 4}, RecordDict(), {})
    seen = []

    def app(message: Message, context: Context) -> Message:
        seen.append(set(context.state))
        if how == "replaces":
            context.state = RecordDict({"mine": ConfigRecord({"rounds": 1})})
        elif how == "clears":
            context.state.clear()
        else:
            context.state["mine"] = ConfigRecord({"rounds": 1})
        return trained(message)

    mod = PrivateUpdates(MODEL, consent=Consent(facts))
    for value in (0.0, 1.0):
        asked = question()
        asked.content[wire.CONFIG][wire.PLAN] = plan.to_json()
        asked.content[wire.ARRAYS] = ArrayRecord(
            {wire.MODEL: Array(np.full(LAYERS.size, value, dtype=np.float32))}
        )
        if value == 0.0:
            mod(asked, context, app)
            continue
        with pytest.raises(PrivacyError, match="made the 1 releases it agreed to"):
            mod(asked, context, app)
    kept = set() if how == "clears" else {"mine"}
    assert seen == [set(), kept]
    assert set(context.state) == {wire.SECRET, wire.RELEASES} | kept


@pytest.mark.parametrize("how", ["replaces", "clears", "keeps it for later"])
def test_nor_can_its_lifespan(how):
    facts = RunFacts(2.0, Sampling("poisson", 4, 1.0), "replace-one", "local", rounds=1)
    plan = mechanisms.get("uniform").plan(LAYERS, facts, None)
    context = Context(1, 7, {wire.PARTITION: 2, wire.PARTITIONS: 4}, RecordDict(), {})
    app = PrivateClientApp(MODEL, consent=Consent(facts))
    kept, steps = [], []

    @app.lifespan()
    def lifespan(context: Context):
        steps.append(set(context.state))
        if how == "replaces":
            context.state = RecordDict()
        elif how == "clears":
            context.state.clear()
        context.state["mine"] = ConfigRecord({"rounds": 1})
        context.helper = "of the app"
        kept.append(context)
        yield
        steps.append((set(context.state), context.helper))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert context.helper == "of the app"
        assert set(context.state) == {"mine"}
        kept[0].state.clear()
        context.helper = "of the training"
        return trained(message)

    def answer(value: float) -> Message:
        asked = question()
        asked.content[wire.CONFIG][wire.PLAN] = plan.to_json()
        asked.content[wire.ARRAYS] = ArrayRecord(
            {wire.MODEL: Array(np.full(LAYERS.size, value, dtype=np.float32))}
        )
        return app(asked, context)

    assert not answer(0.0).has_error()
    assert steps == [set(), ({"mine"}, "of the training")]
    assert set(context.state) == {wire.SECRET, wire.RELEASES, "mine"}
    assert "made the 1 releases it agreed to" in answer(1.0).error.reason


def returns_other_names(message: Message, context: Context) -> Message:
    state = {f"net.{name}": value for name, value in MODEL.state_dict().items()}
    return Message(RecordDict({"arrays": ArrayRecord(state)}), reply_to=message)


@pytest.mark.parametrize(
    ("train", "cause"),
    [
        (raises, "KeyError: 'patient 4711'"),
        (returns_other_names, "must return 'weight' of shape (2, 3), got None"),
        (lambda message, context: None, "must return a Message, got NoneType"),
    ],
)
def test_the_server_gets_one_sentence_and_the_client_keeps_the_cause(train, cause):
    """In a simulation Flower would send all of Ray's traceback."""
    app = PrivateClientApp(MODEL)
    app.train()(train)
    with TestCase().assertLogs("fedlgm.client") as logged:
        reply = app(question(), HERE)
    assert reply.error.reason == "this client's app failed: the log of its node says why"
    assert cause in logged.output[0]


def test_a_node_without_a_number_says_so():
    app = PrivateClientApp(MODEL)
    app.train()(raises)
    assert wire.PARTITION in app(question(), Context(1, 7, {}, RecordDict(), {})).error.reason
