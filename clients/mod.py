"""Privacy for an existing Flower ClientApp: a mod that bounds what the app returns, and an app that carries it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from clients.consent import Consent
from clients.layerwise import place_reply
from clients.serving import OneClient
from fedlgm import wire
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError, RunError
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan
from fedlgm.release import local_release

Next = Callable[[Message, Context], Message]
_log = logging.getLogger("fedlgm.mod")


class PrivateUpdates:
    """Flower mod: the app trains as it always does, and only its bounded update leaves the client.

    The app gets the global model as it knows it, one ArrayRecord of `state_dict` names under "arrays", and returns one
    of the same names. The mod takes the difference of the trainable parameters, bounds it layer by layer as the round's
    plan says and, under local trust, adds the client's own noise. Everything else that the app returns (metrics,
    numbers of examples, buffers, texts of errors) stays on the client: it would be an unprotected figure of private
    data. That the app failed is told, without a reason.

    An app that carries the mod must also answer queries (`answer`), which Flower does not pass to mods alone;
    `PrivateClientApp` does both.

    Args:
        model: the app's model; only names, shapes and which parameters are trained are used.
        group_by: see `LayerTable.from_module`; the strategy's must be the same.
        consent: what this client agrees to under local trust; without it the client refuses local trust.

    Example:
        >>> mod = PrivateUpdates(nn.Linear(3, 2))
        >>> app = ClientApp(mods=[mod])
        >>> answer = app.query()(mod.answer)
        >>> @app.train()
        ... def train(message, context): ...
    """

    def __init__(
        self, model: nn.Module, *, group_by: str | Callable[[str], str] = "module", consent: Consent | None = None
    ) -> None:
        self._layers, self._consent = LayerTable.from_module(model, group_by), consent
        self._module = copy.deepcopy(model)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Serve one message: "query" says who lives here, "train" trains and bounds, everything else is refused."""
        kind = message.metadata.message_type
        if kind == MessageType.QUERY:
            return self.answer(message, context)
        own = _own_client(context)
        if kind != MessageType.TRAIN:
            raise PrivacyError(
                f"this client answers train messages only, got {kind!r}: other figures are not protected"
            )
        config = message.content.config_records[wire.CONFIG]
        own.check([int(c) for c in config[wire.CLIENTS]])  # type: ignore[union-attr]
        plan = self._plan(str(config[wire.PLAN]))
        round_ = int(config[wire.ROUND])  # type: ignore[arg-type]
        model = torch.from_numpy(wire.view(message.content.array_records[wire.ARRAYS][wire.MODEL].data).copy())
        update = self._flat(self._trained(message, model, context, call_next)) - model
        if plan.facts.trust == "local":
            total = self._release(update, plan, model, context, round_, own.number)
        else:
            total = BoundedSum.empty(plan)
            total.add(update[None])
        arrays = ArrayRecord({wire.SUM: Array(**wire.fields(total.total.numpy()))})
        counts = MetricRecord({wire.CLIENT_COUNT: 1, wire.DISCARDED: 0})
        return Message(content=RecordDict({wire.ARRAYS: arrays, wire.METRICS: counts}), reply_to=message)

    def _trained(self, message: Message, model: Tensor, context: Context, call_next: Next) -> RecordDict:
        """What the app returns; what it says of a failure stays here, since it may quote private data.

        Raises:
            RunError: it fails. Flower sends this error's text to the server, and writes its cause into this node's log.
        """
        why = "this client's app failed: the log of its node says why"
        try:
            reply = call_next(self._as_the_app_knows_it(message, model), context)
        except Exception as error:
            raise RunError(why) from error
        if reply.has_error():
            _log.error("the app answered with an error: %s", reply.error.reason)
            raise RunError(why)
        return reply.content

    @staticmethod
    def answer(message: Message, context: Context) -> Message:
        """The reply to the strategy's question which client this node is: what its own configuration names."""
        return place_reply(message, _own_client(context))

    def _plan(self, text: str) -> ReleasePlan:
        """The round's plan; a plan over one layer is for the model as a whole."""
        whole = len(json.loads(text).get("clip", ())) == 1 and len(self._layers) > 1
        plan = ReleasePlan.from_json(self._layers.merged() if whole else self._layers, text)
        if plan.facts.trust == "local" and self._consent is None:
            raise PrivacyError("this client has not agreed to add its own noise: give PrivateUpdates a consent")
        if self._consent is not None:
            self._consent.check(plan)
        return plan

    def _release(
        self, update: Tensor, plan: ReleasePlan, model: Tensor, context: Context, round_: int, client: int
    ) -> BoundedSum:
        keys = node_keys(context).derive(model.numpy().tobytes(), plan.to_json().encode())
        own, name = local_release(update[None], plan, keys, round_, client)
        assert self._consent is not None
        self._consent.record(context.state, client, name, plan)
        return own

    def _as_the_app_knows_it(self, message: Message, model: Tensor) -> Message:
        """The message with the model under the app's own names and without what only the mod needs."""
        self._layers.load_(self._module, model)
        own = {wire.ROUND, wire.CLIENTS, wire.PLAN}
        config = {k: v for k, v in message.content.config_records[wire.CONFIG].items() if k not in own}
        content = RecordDict({wire.ARRAYS: ArrayRecord(self._module.state_dict()), wire.CONFIG: ConfigRecord(config)})
        return Message(content=content, metadata=message.metadata)  # type: ignore[call-overload]

    def _flat(self, content: RecordDict) -> Tensor:
        """The trained parameters as one vector [D].

        Raises:
            ConfigError: the app returned no parameters, or others.
        """
        if len(content.array_records) != 1:
            raise ConfigError(f"the ClientApp must return one ArrayRecord, got {len(content.array_records)}")
        state = next(iter(content.array_records.values())).to_torch_state_dict()
        parts = []
        for slot in self._layers.slots():
            value = state.get(slot.name)
            if value is None or tuple(value.shape) != slot.shape:
                shape = None if value is None else tuple(value.shape)
                raise ConfigError(f"the ClientApp must return {slot.name!r} of shape {slot.shape}, got {shape}")
            parts.append(value.detach().reshape(-1).to(torch.float32))
        return torch.cat(parts)


class PrivateClientApp(ClientApp):
    """A Flower `ClientApp` whose train function's updates leave the client bounded; see `PrivateUpdates`.

    Example:
        >>> app = PrivateClientApp(torch.nn.Linear(3, 2))
        >>> @app.train()
        ... def train(message, context): ...

    Args:
        model: the app's model.
        mods: the app's other mods, which see the model and the update as the app knows them.
        options: see `PrivateUpdates`.
    """

    def __init__(self, model: nn.Module, *, mods: Sequence[Any] = (), **options: Any) -> None:
        private = PrivateUpdates(model, **options)
        super().__init__(mods=[private, *mods])
        self.query()(private.answer)


def node_keys(context: Context) -> KeyRing:
    """Secret ring of a node's noise, made once and kept in the node's own state.

    Flower starts a process per message: with fresh keys in each, a repeated request would be another release.

    Example:
        >>> context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
        >>> node_keys(context) == node_keys(context), node_keys(context).secret
        (True, True)
    """
    if wire.SECRET not in context.state:
        context.state[wire.SECRET] = ConfigRecord({"root": f"{KeyRing.from_seed(None).root:032x}"})
    return KeyRing(int(str(context.state.config_records[wire.SECRET]["root"]), 16), secret=True)


def _own_client(context: Context) -> OneClient:
    """The client that the node's configuration names; the strategy checks it against its own number of clients."""
    stated = context.node_config.get(wire.PARTITIONS)
    return OneClient.of_node(context.node_config, int(str(stated)) if str(stated).isdigit() else 1)
