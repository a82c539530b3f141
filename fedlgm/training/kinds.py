"""Kinds of local training by name: `get`, `names`, `register`.

    kind = kinds.get("fedprox", mu=0.01)
    trainer = kind.sequential(module, layers, settings, device="cpu", task=task)

Updates are bounded after training, so the kind of training changes no guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.extension import loader as extension
from fedlgm.extension.loader import misfit, parameters_of, shown_name, users_code
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.extension.separation import package_of_code
from fedlgm.training.apart import ClientsApart
from fedlgm.training.base import Trainer
from fedlgm.training.fedprox import FedProx, VectorizedFedProx
from fedlgm.training.fedsgd import FedSGD, VectorizedFedSGD
from fedlgm.training.mixed import MixedPrecisionTrainer
from fedlgm.training.native import NativeTrainer
from fedlgm.training.scheduled import ScheduledTrainer
from fedlgm.training.sequential import SequentialTrainer
from fedlgm.training.vectorized import VectorizedTrainer

MakesTrainer = Callable[..., Trainer]


@dataclass(frozen=True)
class TrainerKind:
    """The functions that build one kind of trainer.

    Attributes:
        sequential: function (module, layers, settings, *, device, task) -> `Trainer`. The trainer
            trains one client after another, and is the reference for the other trainers.
        vectorized: function with the additional arguments `width` and `compile`, whose trainer
            trains many clients at once; None if there is no such trainer.
        native: function with the arguments of `sequential`, whose trainer uses the compiled kernel;
            None if there is no such trainer.
        together: text that explains how a user's vectorised trainer could mix clients; None if
            there is no such trainer.

    Example:
        >>> TrainerKind(SequentialTrainer).vectorized is None
        True
    """

    sequential: MakesTrainer
    vectorized: MakesTrainer | None = None
    native: MakesTrainer | None = None
    together: str | None = None

    @property
    def apart(self) -> bool:
        """Whether `sequential` creates a trainer with a fresh copy of the model for every client,
        which is so for a user's trainer.
        """
        return isinstance(self.sequential, partial) and self.sequential.func is ClientsApart


PLAIN = TrainerKind(SequentialTrainer, VectorizedTrainer, NativeTrainer)
"""Plain training: minibatch SGD or Adam with the settings of a recipe's section [training]."""

_PASSED = ("device", "task")
_KINDS: Registry[TrainerKind] = Registry(
    "trainer",
    {
        "fedprox": TrainerKind(FedProx, VectorizedFedProx),
        "fedsgd": TrainerKind(FedSGD, VectorizedFedSGD),
        "bfloat16": TrainerKind(MixedPrecisionTrainer),
        "scheduled": TrainerKind(ScheduledTrainer),
    },
)


def names() -> tuple[str, ...]:
    """Names of all trainers except the plain trainer.

    Example:
        >>> "fedprox" in names()
        True
    """
    return _KINDS.names()


@registers
def register(name: str, sequential: MakesTrainer, vectorized: MakesTrainer | None = None) -> None:
    """Register a trainer under a name, for recipes ([trainer]) and `simulate(trainer=name)`.

    Args:
        name: name of the trainer in recipes.
        sequential: see `TrainerKind`.
        vectorized: see `TrainerKind`.

    Raises:
        ConfigError: the name is taken, or `sequential` or `vectorized` is not callable.

    Example:
        >>> register("fedprox", FedProx, VectorizedFedProx)  # allowed, because it is registered in the same way already
        >>> register("fedprox", SequentialTrainer)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: there is a trainer 'fedprox' already: choose another name
    """
    for make in filter(None, (sequential, vectorized)):
        _check_maker(name, make)
    _KINDS.add(name, TrainerKind(sequential, vectorized))


def options_of(trainer: str) -> tuple[str, ...]:
    """Names of a trainer's options: the parameters of its `sequential` after module, layers and
    settings, except `device` and `task`.

    Raises:
        ConfigError: the trainer is unknown.

    Example:
        >>> options_of("fedprox")
        ('mu',)
    """
    maker = _find(trainer).sequential
    placed = [
        name
        for name, value in parameters_of(maker).items()
        if value.kind is value.POSITIONAL_OR_KEYWORD
    ]
    return extension.options_of(maker, (*placed[:3], *_PASSED))


def get(trainer: str | MakesTrainer | None = None, **options: Any) -> TrainerKind:
    """Return a kind of trainer.

    Args:
        trainer: one of `names()`, "package.module:name" of your own function or class, or this
            function or class itself; None means plain training.
        options: options of the trainer, passed as keywords to the functions that create it.

    Raises:
        ConfigError: the trainer is unknown or not callable, or does not take an option.

    Example:
        >>> get("fedprox", mue=0.1)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: trainer 'fedprox' has no option 'mue'; known: mu
    """
    if trainer is None:
        return PLAIN
    kind = _find(trainer)
    if isinstance(trainer, str) and trainer in _KINDS:
        option_names = options_of(trainer)
        unknown = [name for name in options if name not in option_names]
        if unknown:
            raise ConfigError(
                f"trainer {trainer!r} has no option {unknown[0]!r}; known: "
                f"{', '.join(option_names) or 'none'}"
            )
    sequential, vectorized = _bind_options(trainer, kind.sequential, options), None
    if package_of_code(kind.sequential) != "fedlgm":
        sequential = partial(ClientsApart, sequential)
    if kind.vectorized is not None:
        vectorized = _bind_options(trainer, kind.vectorized, options)
    is_custom = vectorized is not None and package_of_code(kind.vectorized) != "fedlgm"
    together = (
        f"trainer {shown_name(trainer)} trains several clients in one call" if is_custom else None
    )
    return TrainerKind(sequential, vectorized, together=together)


def _find(trainer: str | MakesTrainer) -> TrainerKind:
    kind = _KINDS.find(trainer) if isinstance(trainer, str) else trainer
    if isinstance(kind, TrainerKind):
        return kind
    _check_maker(trainer, kind)
    return TrainerKind(kind)


def _check_maker(trainer: str | MakesTrainer, maker: object) -> None:
    if not callable(maker):
        raise ConfigError(
            f"trainer {shown_name(trainer)} must be a class or function (module, layers, settings, "
            f"*, device, task) -> fedlgm.training.Trainer, got {type(maker).__name__}"
        )


def _bind_options(
    trainer: str | MakesTrainer, maker: MakesTrainer, options: Mapping[str, Any]
) -> MakesTrainer:
    """Bind options to the function that creates a trainer. The function must accept the options,
    and must return a trainer.
    """
    wrong = misfit(maker, None, None, None, device="cpu", task=None, **options)
    if wrong:
        raise ConfigError(f"trainer {shown_name(trainer)}: {wrong}")

    def make(*arguments: Any, **keywords: Any) -> Trainer:
        with users_code(f"trainer {shown_name(trainer)}", maker):
            result = maker(*arguments, **keywords, **options)
        if not callable(getattr(result, "updates", None)):
            raise ConfigError(
                f"trainer {shown_name(trainer)} returns an object of type {type(result).__name__} "
                "without a method updates(model, tasks)"
            )
        return result

    return make
