"""Privacy for an existing Flower ClientApp: a mod that bounds the app's updates, and an app with
this mod.
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
    """Flower mod. The app trains without changes, and only its bounded update leaves the client.

    The app gets the global model in its own form, one ArrayRecord of `state_dict` names under
    "arrays", and returns a record with the same names. The mod takes the difference of the
    trainable parameters, bounds it layer by layer according to the round's plan and, under local
    trust, adds the client's own noise. Everything else that the app returns (metrics, numbers of
    examples, buffers, texts of errors, metadata) stays on the client, because it depends on private
    data and has no noise. The server learns that the app failed, but not why. The app sees the
    node's state without the mod's records in it, so that it cannot lose the client's key or its
    spent budget.

    An app with the mod must also answer queries (`answer`), which Flower does not pass to mods;
    `PrivateClientApp` does both.

    Args:
        model: the app's model. Only the names and shapes of its parameters and the choice of
            trained parameters are used.
        group_by: see `LayerTable.from_module`; it must equal the strategy's.
        consent: limits that this client accepts under local trust; without it the client refuses
            local trust.
        mechanism: the run's mechanism, as in `PrivateFedAvg`, if it lets clients plan their own
            releases: "ladp:published" or "client-ladp". With any other mechanism, clients follow
            the round's plan.

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
        """Serve one message: "query" names the client, "train" trains and bounds, and all other
        types are refused.

        Raises:
            ConfigError: a mod of Flower's own differential privacy comes after this one.
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
        """The app's update [D].

        Raises:
            RunError: the app failed, or did not return the model's parameters; see `quiet`.
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
        """The reply to the strategy's query: the client named in this node's configuration."""
        return place_reply(message, _own_client(context))

    def _table(self, message: Message) -> LayerTable:
        """The layers of the round's plan; a plan over one layer applies to the whole model."""
        text = str(message.content.config_records[wire.CONFIG][wire.PLAN])
        is_merged = len(json.loads(text).get("clip", ())) == 1 and len(self._layers) > 1
        return self._layers.as_single_layer() if is_merged else self._layers

    def _as_the_app_knows_it(self, message: Message, model: Tensor) -> Message:
        """The message with the model under the app's own names, without the mod's own records."""
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
        """The trained parameters as one vector [D].

        Raises:
            ConfigError: the app returned no parameters, or different ones.
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
    """Keep the mod's own records out of the app's state, whatever the app does with it in the
    block.

    Args:
        context: the node's context, which takes over the app's changes at the end.
        seen: the app's copy of the context, which is brought up to date at the start.
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
    """The update of a user's app, computed on demand."""

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
        mods: the app's other mods. They see the model and the update in the app's own form.
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
        """Flower's decorator. As in the train function, errors stay on the node, and the app does
        not see the mod's records.
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
        """Flower's decorator. It refuses the same mods as the app does."""
        for mod in mods or ():
            _refuse_noise_of_flower(mod)
        train: Callable[[Any], Any] = super().train(*arguments, mods=list(mods or ()), **options)
        return train

    def evaluate(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        """Flower's decorator, with a warning. The function is kept, but no strategy of fedlgm calls
        it.
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
    """Refuse the mods of Flower's own differential privacy. They would bound and noise the update a
    second time.
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
    """Secret ring of a node's noise, created once and kept in the node's state.

    Flower starts a process per message. If each process had fresh keys, a repeated request would be
    another release.

    Example:
        >>> context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config={})
        >>> node_keys(context) == node_keys(context), node_keys(context).secret
        (True, True)
    """
    if wire.SECRET not in context.state:
        context.state[wire.SECRET] = ConfigRecord({"root": f"{KeyRing.from_seed(None).root:032x}"})
    return KeyRing(int(str(context.state.config_records[wire.SECRET]["root"]), 16), secret=True)


def _own_client(context: Context) -> OneClient:
    """The client that the node's configuration names; the strategy checks it against its own number
    of clients.
    """
    stated = context.node_config.get(wire.PARTITIONS)
    return OneClient.of_node(context.node_config, int(str(stated)) if str(stated).isdigit() else 1)
