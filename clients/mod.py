"""Differential privacy for an existing Flower ClientApp: a mod that bounds the app's updates, and a
ClientApp with this mod.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from torch import Tensor, nn

from clients.choice import planner_of
from clients.consent import Agreed, Consent
from clients.flower_private import called_by
from clients.layerwise import asked_of, place_reply, reply_with
from clients.replying import ReplyingApp, quiet
from clients.serving import OneClient
from fedlgm import mechanisms, wire
from fedlgm.aggregation.client_release import Asked, WholeUpdates, client_release
from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import ConfigError, Notice, PrivacyError, RunError
from fedlgm.extension.loader import misfit
from fedlgm.mechanisms.mechanism import Mechanism, require_mechanism
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.training.models.arrays import of_arrays
from fedlgm.training.models.copies import copy_model
from fedlgm.training.models.requirements import require_trainable

Next = Callable[[Message, Context], Message]
_OWN_STATE = (wire.SECRET, wire.RELEASES)
_ENDED = object()
_FLOWERS_NOISE = ("fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod")


class PrivateUpdates:
    """A Flower mod for an app whose training code stays as it is; only the bounded update leaves
    the client.

    The app gets the global model as one ArrayRecord under "arrays", with the names of the model's
    `state_dict`, and returns a record with the same names. The mod takes the difference of the
    trainable parameters, bounds it layer by layer according to the round's plan and, under local
    trust, adds the client's own noise. Everything else that the app returns (metrics, numbers of
    examples, buffers, texts of errors, metadata) stays on the client, because it depends on private
    data and has no noise. If the app fails, the server learns that it failed, but not why. The app
    sees the node's state without the mod's records, so that it cannot delete the client's key or
    the record of the spent budget.

    An app with the mod must also answer queries with `answer`, because Flower does not pass queries
    to mods. A `PrivateClientApp` has the mod and answers queries.

    Args:
        model: the app's model. Only the names and shapes of its parameters are used, and which of
            them are trained.
        group_by: see `LayerTable.from_module`; must be the same as `group_by` of the strategy.
        consent: the limits that this client agrees to under local trust. A client without a consent
            refuses local trust.
        mechanism: the run's mechanism, given as in `PrivateFedAvg`, if it lets clients plan their
            own releases, as "ladp:published" and "client-ladp" do. Under any other mechanism,
            clients follow the round's plan.

    Example:
        >>> from flwr.clientapp import ClientApp
        >>> mod = PrivateUpdates(nn.Linear(3, 2))
        >>> app = ClientApp(mods=[mod])
        >>> answer = app.query()(mod.answer)
        >>> @app.train()
        ... def train(message, context): ...
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group_by: str | Callable[[str], str] = "module",
        consent: Consent | None = None,
        mechanism: str | Mechanism | None = None,
    ) -> None:
        require_trainable(model, repr(type(model).__name__), statistics=True)
        if isinstance(mechanism, str):
            name, variant = mechanisms.split(mechanism)
            mechanism = mechanisms.get(name, variant=variant or "sound")
        self._mechanism = None if mechanism is None else require_mechanism(mechanism)
        self._layers, self._consent = LayerTable.from_module(model, group_by), consent
        self._module = copy_model(model)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        """Answer one message: a "query" with the number of the client, and a "train" message with
        the bounded update. All other types are refused.

        Raises:
            ConfigError: a mod of Flower's own differential privacy comes after this mod.
        """
        kind = message.metadata.message_type
        for mod in called_by(call_next):
            _refuse_noise_of_flower(mod)
        if kind == MessageType.QUERY:
            return self.answer(message, context)
        client = _own_client(context)
        if kind != MessageType.TRAIN:
            raise PrivacyError(
                f"this client answers only train messages, not {kind!r}, because other figures are "
                "not protected"
            )
        asked = asked_of(message, self._table(message), client)
        update = _GivenUpdate(lambda: self._update(message, asked.model, context, call_next))
        update.planner = planner_of(self._mechanism)  # new: it keeps figures of its releases
        agreed = Agreed(node_keys(context), self._consent, context.state, needed=True)
        total = client_release(update, agreed, asked)
        return reply_with(
            message, {wire.SUM: total.total.numpy()}, {wire.CLIENT_COUNT: 1, wire.DISCARDED: 0}
        )

    def _update(self, message: Message, model: Tensor, context: Context, call_next: Next) -> Tensor:
        """Let the app train, and return its update [D].

        Raises:
            RunError: the app failed or did not return the model's parameters; see `quiet`.
        """
        seen = copy.copy(context)
        with quiet("app"), _apart(context, seen):
            reply = call_next(self._as_the_app_knows_it(message, model), seen)
            if not isinstance(reply, Message):
                raise ConfigError(
                    f"the ClientApp must return a Message, got {type(reply).__name__}"
                )
            if reply.has_error():
                raise RunError(f"the app answered with an error: {reply.error.reason}")
            return self._flat(reply.content) - model

    @staticmethod
    def answer(message: Message, context: Context) -> Message:
        """Answer the strategy's query with the client that this node's configuration names."""
        return place_reply(message, _own_client(context))

    def _table(self, message: Message) -> LayerTable:
        """Return the layer table of the round's plan. A plan with one layer has one bound for the
        whole model.
        """
        text = str(message.content.config_records[wire.CONFIG][wire.PLAN])
        is_merged = len(json.loads(text).get("clip", ())) == 1 and len(self._layers) > 1
        return self._layers.as_single_layer() if is_merged else self._layers

    def _as_the_app_knows_it(self, message: Message, model: Tensor) -> Message:
        """Convert the message to the form that the app knows: the model has the names of its
        `state_dict`, and the entries for the mod are removed.
        """
        self._layers.load_(self._module, model)
        keys = {wire.ROUND, wire.CLIENTS, wire.PLAN}
        config = {
            k: v for k, v in message.content.config_records[wire.CONFIG].items() if k not in keys
        }
        content = RecordDict(
            {wire.ARRAYS: ArrayRecord(self._module.state_dict()), wire.CONFIG: ConfigRecord(config)}
        )
        return Message(content=content, metadata=copy.copy(message.metadata))  # type: ignore[call-overload]

    def _flat(self, content: RecordDict) -> Tensor:
        """Join the trained parameters that the app returned to one vector [D].

        Raises:
            ConfigError: a parameter is missing, or its shape or type is wrong.
        """
        if len(content.array_records) != 1:
            raise ConfigError(
                f"the ClientApp must return one ArrayRecord, got {len(content.array_records)}"
            )
        state = next(iter(content.array_records.values())).to_torch_state_dict()
        parts = []
        for slot in self._layers.slots():
            value = state.get(slot.name)
            if value is None or tuple(value.shape) != slot.shape:
                shape = None if value is None else tuple(value.shape)
                raise ConfigError(
                    f"the ClientApp must return {slot.name!r} of shape {slot.shape}, got {shape}"
                )
            if value.is_complex():
                raise ConfigError(
                    f"the ClientApp must return {slot.name!r} as real numbers, got {value.dtype}"
                )
            parts.append(value.detach().reshape(-1).to(torch.float32))
        return torch.cat(parts)


@contextmanager
def _apart(context: Context, seen: Context) -> Iterator[None]:
    """Remove the mod's records from the state that the app sees in the block, and keep them in the
    node's state whatever the app changes.

    Args:
        context: the node's context, into which the app's changes are copied at the end of the
            block.
        seen: the app's copy of the context, which is updated from `context` at the start of the
            block.
    """
    state = context.state
    others = RecordDict({name: record for name, record in state.items() if name not in _OWN_STATE})
    vars(seen).update(vars(context) | {"state": others})
    yield
    for name in [name for name in state if name not in _OWN_STATE]:
        del state[name]
    state.update({name: record for name, record in seen.state.items() if name not in _OWN_STATE})
    vars(context).update(vars(seen) | {"state": state})


class _GivenUpdate(WholeUpdates):
    """A client's update that the user's app computes on demand."""

    def __init__(self, make_update: Callable[[], Tensor]) -> None:
        super().__init__()
        self._made = make_update

    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        yield asked.clients, self._made()[None]


class PrivateClientApp(ReplyingApp):
    """A Flower `ClientApp` that bounds the updates of its train function before they leave the
    client (see `PrivateUpdates`).

    Example:
        >>> app = PrivateClientApp(torch.nn.Linear(3, 2))
        >>> @app.train()
        ... def train(message, context): ...

    Args:
        model: the app's model, or the list of NumPy arrays that an app without torch sends.
        mods: further mods of the app. These mods see the model and the update in the form that the
            app knows.
        options: see `PrivateUpdates`.

    Raises:
        ConfigError: a `client_fn` is given instead of the model, as in older apps; the model cannot
            be trained (see `fedlgm.training.models.require_trainable`); or a mod of Flower's own
            differential privacy is among `mods`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[np.ndarray] | None = None,
        *,
        mods: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        model = of_arrays(model)
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise ConfigError(
                f"PrivateClientApp takes the model itself: PrivateClientApp({model.__name__}(...))"
            )
        if "client_fn" in options or not isinstance(model, nn.Module):
            given = (
                "client_fn" if "client_fn" in options or callable(model) else type(model).__name__
            )
            raise ConfigError(
                f"PrivateClientApp takes the model, an nn.Module, not {given}: an app with a "
                "client_fn (NumPyClient) moves its training loop under @app.train(), as "
                "docs/how-to/flower-app.md shows under 'An older app'"
            )
        wrong = misfit(PrivateUpdates, model, **options)
        if wrong:
            raise ConfigError(
                f"PrivateClientApp {wrong}; its options are group_by, consent, mechanism and mods"
            )
        for mod in mods:
            _refuse_noise_of_flower(mod)
        private = PrivateUpdates(model, **options)
        super().__init__(mods=[private, *mods])
        self.query()(private.answer)

    def lifespan(self) -> Callable[[Any], Any]:
        """Register a lifespan function, as Flower's decorator does. As in the train function, the
        texts of errors stay on the node, and the app does not see the mod's records.
        """

        def decorator(
            function: Callable[[Context], Iterator[None]],
        ) -> Callable[[Context], Iterator[None]]:
            @wraps(function)
            def run_apart(context: Context) -> Iterator[None]:
                with quiet("app"):
                    seen = copy.copy(context)
                    with _apart(context, seen):
                        running = iter(function(seen))
                    while True:
                        with _apart(context, seen):
                            if next(running, _ENDED) is _ENDED:
                                return
                        yield

            super(PrivateClientApp, self).lifespan()(run_apart)
            return function

        return decorator

    def train(
        self, *arguments: Any, mods: Sequence[Any] | None = None, **options: Any
    ) -> Callable[[Any], Any]:
        """Register the train function, as Flower's decorator does. The mods of Flower's own
        differential privacy are refused.
        """
        for mod in mods or ():
            _refuse_noise_of_flower(mod)
        train: Callable[[Any], Any] = super().train(*arguments, mods=list(mods or ()), **options)
        return train

    def evaluate(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Register the evaluate function, as Flower's decorator does, and warn that no strategy of
        fedlgm calls this function.
        """
        warnings.warn(
            Notice(
                "functions under @app.evaluate are not called, because their figures of private "
                "data would leave the client unprotected: evaluate on the server, with "
                "start(evaluate_fn=...)"
            ),
            stacklevel=2,
        )
        evaluate: Callable[[Any], Any] = super().evaluate(*arguments, **options)
        return evaluate


def _refuse_noise_of_flower(mod: Any) -> None:
    """Raise ConfigError for a mod of Flower's own differential privacy, which would bound the
    update or add noise to it a second time.
    """
    while isinstance(mod, partial):
        mod = mod.func
    for kind in (mod, *type(mod).__mro__):
        name = getattr(kind, "__name__", "")
        if name in _FLOWERS_NOISE and str(kind.__module__).startswith("flwr."):
            raise ConfigError(
                f"mods: {name} is a part of Flower's own differential privacy: the update is "
                "bounded already, and a second bound or noise only adds error that no ledger "
                "counts; leave it out"
            )


def node_keys(context: Context) -> KeyRing:
    """Return the secret key ring of a node's noise. It is created once and stored in the node's
    state.

    Flower starts a process for each message. If each process had fresh keys, the answer to a
    repeated request would have different noise and would be another release.

    Example:
        >>> context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
        >>> node_keys(context) == node_keys(context), node_keys(context).secret
        (True, True)
    """
    if wire.SECRET not in context.state:
        context.state[wire.SECRET] = ConfigRecord({"root": f"{KeyRing.from_seed(None).root:032x}"})
    return KeyRing(int(str(context.state.config_records[wire.SECRET]["root"]), 16), secret=True)


def _own_client(context: Context) -> OneClient:
    """Return the client that the node's configuration names. The strategy checks its number against
    the run's number of clients.
    """
    stated = context.node_config.get(wire.PARTITIONS)
    return OneClient.of_node(context.node_config, int(str(stated)) if str(stated).isdigit() else 1)
