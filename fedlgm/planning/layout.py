"""Memory layout of convolutions on the CPU, for training with autograd and for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fedlgm.training import inputs
from fedlgm.training.devices import fork_rng
from fedlgm.training.inputs import Inputs


def prefer_channels_last_(module: nn.Module) -> list[RemovableHandle]:
    """Make a model's convolutions return channels-last activations, in place, until the returned
    handles are removed.

    torch's max-pooling is vectorised only in this layout; models without max-pooling are slower in
    it. Weights keep their layout, so they can stay views of a flat vector, and the model's results
    are equal up to rounding.
    """
    return [
        child.register_forward_hook(_channels_last)
        for child in module.modules()
        if isinstance(child, nn.Conv2d)
    ]


def on_cpu(module: nn.Module) -> bool:
    """Whether all parameters are on the CPU."""
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


@contextmanager
def laid_out(module: nn.Module, like: Inputs) -> Iterator[None]:
    """Within the block, use the memory layout that is faster for inputs [n, ...] such as `like`."""
    handles = prefer_channels_last_(module) if on_cpu(module) and _has_pooling(module, like) else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_SEEN: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()


def _has_pooling(module: nn.Module, like: Inputs) -> bool:
    """The result of `pools_maxima`, computed once for a model and a shape of inputs."""
    kind = inputs.each(lambda part: (part.shape[1:], part.dtype), like)
    if _SEEN.get(module, (None, False))[0] != kind:
        _SEEN[module] = kind, pools_maxima(module, like)
    return _SEEN[module][1]


def pools_maxima(module: nn.Module, like: Inputs) -> bool:
    """Whether a model with convolutions takes maxima over windows, as a layer or by a function.

    Args:
        module: the model.
        like: inputs [n, ...]. Only their shape matters, so the answer is the same for every client
            and worker.

    Example:
        >>> conv = nn.Conv2d(1, 2, 3)
        >>> x = torch.zeros(2, 1, 8, 8)
        >>> pools_maxima(nn.Sequential(conv, nn.MaxPool2d(2)), x), pools_maxima(nn.Sequential(conv, nn.AvgPool2d(2)), x)
        (True, False)
    """
    if not any(isinstance(child, nn.Conv2d) for child in module.modules()):
        return False
    with torch.no_grad(), fork_rng(None), _Watch() as watch:
        inputs.call(module, inputs.each(lambda part: torch.zeros_like(part[:2]), like))
    return watch.pooled


class _Watch(TorchFunctionMode):  # type: ignore[no-untyped-call,misc]
    """Detects max-pooling."""

    pooled = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.pooled |= func.__name__.startswith("max_pool2d")
        return func(*args, **(kwargs or {}))


def _channels_last(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous(memory_format=torch.channels_last)
