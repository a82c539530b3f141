"""Models of Hugging Face's `transformers` and `peft`, wrapped as plain modules that map tensors to
logits.

This module imports neither package, and recognises a model by the package of the model's class.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import misfit
from fedlgm.training.devices import fork_rng

_PACKAGES = ("transformers", "peft")
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_PROBLEMS = {"regression": "regression", "multi_label_classification": "multi-label"}


class HuggingFace(nn.Module):
    """A `PreTrainedModel` or `PeftModel` that takes its inputs by position and returns its logits.

    Inputs are token numbers int64 [n, length] (or the input that the model's `main_input_name`
    names: pixels for a vision model), then an attention mask and token types of the same shape.
    Keys and values are never cached.

    Args:
        model: the model, which stays available as `model`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(
        ...     n_layer=1, n_embd=8, n_head=2, n_positions=4, vocab_size=11, bos_token_id=0, eos_token_id=0
        ... )
        >>> import torch
        >>> HuggingFace(GPT2LMHeadModel(config))(torch.zeros(3, 4, dtype=torch.int64)).shape
        torch.Size([3, 4, 11])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Compute the logits [n, ...].

        Raises:
            ConfigError: the model returns no logits, for example because it has no head.
        """
        model: Any = self.model
        named: dict[str, Any] = {getattr(model, "main_input_name", "input_ids"): x}
        if attention_mask is not None:
            named["attention_mask"] = attention_mask
        if token_type_ids is not None:
            named["token_type_ids"] = token_type_ids
        if hasattr(model.config, "use_cache"):
            named["use_cache"] = False
        logits = getattr(model(**named), "logits", None)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"{type(base_model(model)).__name__} returns no logits: use a class with a head, "
                "such as AutoModelForSequenceClassification or AutoModelForCausalLM"
            )
        return logits


def is_huggingface(module: object) -> bool:
    """Whether a module is a model of `transformers` or `peft`.

    Example:
        >>> is_huggingface(nn.Linear(2, 2))
        False
    """
    packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return (
        isinstance(module, nn.Module)
        and hasattr(module, "config")
        and not packages.isdisjoint(_PACKAGES)
    )


def instance_of(model: Any) -> Any:
    """Call a class or function without required arguments, and return the resulting module. Any
    other object is returned unchanged.

    The module is needed because the defaults of a run depend on its class. A function that fails is
    also returned unchanged, because the run calls the function again and reports the error.

    Example:
        >>> instance_of(nn.Identity), instance_of("mlp"), instance_of(nn.Linear) is nn.Linear
        (Identity(), 'mlp', True)
    """
    if callable(model) and not isinstance(model, nn.Module) and not misfit(model):
        with fork_rng(None), suppress(Exception):
            return model()
    return model


def plain(module: Any) -> Any:
    """Wrap a Hugging Face model in a `HuggingFace`. Any other object is returned unchanged.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> plain(layer) is layer
        True
    """
    return HuggingFace(module) if is_huggingface(module) else module


def original(module: nn.Module) -> nn.Module:
    """Undo `plain`: return the model in a `HuggingFace`, and any other module unchanged.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> original(HuggingFace(layer)) is layer
        True
    """
    return module.model if isinstance(module, HuggingFace) else module


def base_model(model: Any) -> Any:
    """Return the `transformers` model inside a model of `peft`, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def task_of(model: Any) -> str | None:
    """Name of the task that suits the head of a Hugging Face model; None if this is the default
    task or the model is of another kind.

    Args:
        model: a module, or a class or function that returns one.

    Example:
        >>> task_of(nn.Linear(2, 2)) is None
        True
    """
    model = instance_of(model)
    if not is_huggingface(model):
        return None
    inner = base_model(model)
    name = type(inner).__name__
    if name.endswith(_CAUSAL):
        return "causal-lm"
    if name.endswith("ForSequenceClassification"):
        problem = inner.config.problem_type or (
            "regression" if inner.config.num_labels == 1 else None
        )
        return _PROBLEMS.get(problem or "")
    return None
