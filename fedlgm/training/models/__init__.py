"""Models by name: models from the papers, two small text models, and users' models.

No bundled model has BatchNorm, other buffers, in-place activations or data-dependent control flow.
All of a model's state can therefore be bounded and noised in the same way, and `torch.func.vmap`
over stacked parameters gives the same results as a loop over clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.extension import loader as extension
from fedlgm.extension.loader import misfit, options_of, parameters_of
from fedlgm.extension.registry import Registry
from fedlgm.files import path_of
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.training.devices import fork_rng
from fedlgm.training.models.adapters import adapt
from fedlgm.training.models.built import refuse_parameter_hooks
from fedlgm.training.models.convolutional import cifar_cnn, cnn, cnn_small, d_cnn
from fedlgm.training.models.copies import copy_model, require_faithful_copies, require_own_storage
from fedlgm.training.models.dense import logistic, mlp
from fedlgm.training.models.huggingface import HuggingFace, original, plain, task_of
from fedlgm.training.models.requirements import (
    draws_at_random,
    freeze_norms_,
    require_drawing_nothing,
    require_repeatable,
    require_seen_gradients,
    require_separate,
    require_trainable,
)
from fedlgm.training.models.residual import resnet18, resnet20, resnet152, to_groupnorm, vgg16
from fedlgm.training.models.text import gru, transformer
from fedlgm.training.models.weights import digest_of_file, load_weights_

__all__ = [
    "HuggingFace",
    "build",
    "copy_model",
    "digest_of_file",
    "draws_at_random",
    "load_weights_",
    "names",
    "options",
    "original",
    "plain",
    "require_drawing_nothing",
    "require_faithful_copies",
    "require_repeatable",
    "require_seen_gradients",
    "require_separate",
    "require_trainable",
    "task_of",
    "to_groupnorm",
]

Model = str | nn.Module | Callable[..., nn.Module]

_MODELS: Registry[Callable[..., nn.Module]] = Registry(
    "model",
    {
        "logistic": logistic,
        "mlp": mlp,
        "cnn": cnn,
        "cnn-small": cnn_small,
        "cifar-cnn": cifar_cnn,
        "s-cnn": cnn,
        "d-cnn": d_cnn,
        "resnet18": resnet18,
        "resnet20": resnet20,
        "resnet152": resnet152,
        "vgg16": vgg16,
        "gru": gru,
        "transformer": transformer,
    },
)
_AXES = {"logistic": None, "mlp": None, "gru": 1, "transformer": 1}
"""Number of axes of one input. Models without an entry need 3 axes; None means any number."""
_SHAPES = {None: "of any shape", 1: "(length,)", 3: "(C, H, W)"}
_FILLED = ("in_shape", "classes")


def names() -> tuple[str, ...]:
    """Names of the bundled models.

    Example:
        >>> {"mlp", "cnn", "transformer"} <= set(names())
        True
    """
    return _MODELS.names()


def options(name: str) -> tuple[str, ...]:
    """Names of the options of a bundled model, or of a user's model ("package.module:name").

    Raises:
        ConfigError: the model is unknown, or cannot be imported.

    Example:
        >>> "hidden" in options("mlp")
        True
    """
    model = _find(name)
    if isinstance(model, nn.Module):
        return ()
    return options_of(model, _FILLED)


def build(
    model: Model,
    *,
    in_shape: tuple[Any, ...],
    classes: int | None,
    seed: int = 0,
    adapters: Mapping[str, Any] | None = None,
    **values: Any,
) -> nn.Module:
    """Build a model whose initial weights depend only on `seed`.

    Global random generators are neither read nor changed. Weights are drawn on the CPU and then
    moved to the default device; under `with torch.device("meta")`, no weights are drawn.

    Args:
        model: one of `names()`, or your own model. The docstrings of the functions that build the
            bundled models describe their layers, options and sources. Your own model is a class or
            function that returns an `nn.Module`, a reference "package.module:name" to one, or an
            `nn.Module`, which is copied with its weights. If your function has parameters
            `in_shape` or `classes`, they get the values of the arguments below; if `classes` is
            None, your parameter `classes` keeps its default. A model of `transformers` or `peft` is
            wrapped in a `HuggingFace`.
        in_shape: shape of one input, such as (C, H, W) of images or (length,) of text, or a tuple
            of several shapes.
        classes: number of outputs per example (`Task.outputs`); None if the data do not determine
            it.
        seed: public seed, 0 <= seed < 2**128.
        adapters: options of `adapters.adapt`, which freezes everything except the adapters.
        **values: options of the model.

    Returns:
        The model. Bundled models map float32 [batch, C, H, W] to logits [batch, classes], or tokens
        int64 [batch, length] to logits [batch, length, classes].

    Raises:
        ConfigError: a name or option is unknown, a value is out of range, or inputs are too small
            for the layers; an object is not a model, has no trainable parameters, or keeps state
            that cannot be protected (see `require_trainable`); or your own function raises an
            exception.

    >>> [tuple(p.shape) for p in build("mlp", in_shape=(4,), classes=2, hidden=[3]).parameters()]
    [(3, 4), (3,), (2, 3), (2,)]
    """
    bundled = isinstance(model, str) and model in _MODELS
    source = _find(model) if isinstance(model, str) else model
    label = repr(
        model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
    )
    if isinstance(source, nn.Module):
        if values:
            raise ConfigError(
                f"model {label} is a module already: it takes no options, got {', '.join(values)}"
            )
        refuse_parameter_hooks(source, "the model is copied and copies have no hooks of parameters")
        module: Any = copy_model(source)
    else:
        if bundled:
            _require_inputs(str(model), in_shape, classes)
        module = _construct(source, label, in_shape, classes, seed, values)
    module = plain(module)
    if not bundled and isinstance(module, nn.Module):
        freeze_norms_(module)
        for child in module.modules():
            if isinstance(child, nn.Embedding | nn.EmbeddingBag):
                child.sparse = False  # the same gradients, which bounds treat as one vector
    if adapters is not None:
        wrong = misfit(adapt, module, **adapters)
        if wrong:
            raise ConfigError(
                f"model.adapters: {wrong}; its options: {', '.join(list(parameters_of(adapt))[1:])}"
            )
        module = adapt(module, **{"seed": seed} | dict(adapters))
    if not bundled:
        require_trainable(module, label)
        require_own_storage(module)
    return module.to(torch.get_default_device())


def _construct(
    source: Any,
    label: str,
    in_shape: tuple[Any, ...],
    classes: int | None,
    seed: int,
    values: dict[str, Any],
) -> Any:
    """Call a function or class, with random generators that are seeded from `seed`, and return the
    result.
    """
    if not callable(source):
        raise ConfigError(
            f"model {label} is neither an nn.Module nor a class or function that returns one"
        )
    drawn = KeyRing.from_seed(seed).torch_generator(Purpose.MODEL).get_state()
    filled: dict[str, Any] = {"in_shape": tuple(in_shape), "classes": classes}
    if classes is None:
        stated = parameters_of(source).get("classes")
        if stated is not None and stated.default is inspect.Parameter.empty:
            raise ConfigError(
                f"model {label} takes `classes`, the number of outputs, which neither the data nor "
                "the task states: override Task.outputs, or give the parameter a default"
            )
        if stated is not None:
            filled["classes"] = stated.default
    device = torch.get_default_device()
    with fork_rng(None), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.set_rng_state(drawn)
        return extension.call_with_options(source, f"model {label}", values, filled)


def _require_inputs(name: str, in_shape: tuple[Any, ...], classes: int | None) -> None:
    """Refuse inputs that a bundled model does not support."""
    axes = _AXES.get(name, 3)
    fits = len(in_shape) == (axes or len(in_shape)) and all(
        isinstance(size, int) and size >= 1 for size in in_shape
    )
    if not fits or classes is None or classes < 1:
        raise ConfigError(
            f"model {name!r} needs in_shape {_SHAPES[axes]} and classes of at least 1, got "
            f"{in_shape} and {classes}"
        )


def _find(name: str) -> Any:
    if name.endswith((".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".onnx")):
        raise ConfigError(
            f"model {name!r} is the name of a file: pass the nn.Module; for the weights of a "
            "public base in a safetensors file set model.weights"
        )
    if name not in _MODELS and ("/" in name or path_of("model.name", name).is_dir()):
        raise ConfigError(
            f"model {name!r} is a folder or a name of the Hugging Face Hub: pass the module that "
            "from_pretrained makes"
        )
    return _MODELS.find(name)
