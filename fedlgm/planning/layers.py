"""The model's layers in order, and one flat float32 vector that holds all of them.

Bounds, sums and noise are computed on the flat vector with a `LayerTable`, so no other module
depends on the order of a `state_dict`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.libraries import Tensor, torch

# number of elements whose float32 sum, in any order, has a relative error below 128 / 2^24
_CHUNK = 128
# names of LoRA factors in `peft` and `fedlgm.training.models.adapters`
_FACTOR = re.compile(r"\.lora_([AB])(\.[^.]+)*$")
SAFETY = 1 - 2.0**-16
"""Layers are cut to this share of their bounds, so that rounding in a norm and a product cannot
raise a layer above its bound.
"""


@dataclass(frozen=True)
class Slot:
    """The range of one parameter tensor in the flat vector.

    Attributes:
        name: name of the parameter, as in `named_parameters`.
        shape: shape of the tensor.
        offset: index of the first coordinate in the flat vector.
        size: number of coordinates.

    Example:
        >>> [(slot.name, slot.shape, slot.offset) for slot in LayerTable.from_module(torch.nn.Linear(4, 3)).slots()]
        [('weight', (3, 4), 0), ('bias', (3,), 12)]
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layer:
    """Consecutive slots that have one bound and one noise scale.

    Attributes:
        name: name of the layer.
        slots: parameter tensors of the layer, in flat order.
        offset: index of the first coordinate in the flat vector.
        size: number d_j of coordinates.
        parts: sizes of the layers that were merged into this layer; empty for a layer of a model.

    Example:
        >>> wide, narrow = LayerTable.from_sizes({"wide": 8, "narrow": 2}).layers
        >>> narrow.offset, narrow.size
        (8, 2)
    """

    name: str
    slots: tuple[Slot, ...]
    offset: int
    size: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerTable:
    """The layers of a model and their ranges in one flat float32 vector [D] of all trained
    parameters.

    Make a table with `LayerTable.from_module(model)`.

    Attributes:
        layers: the K layers in order; layer j covers `flat[offsets[j]:offsets[j + 1]]` and has d_j
            = `sizes[j]` coordinates.

    Raises:
        ConfigError: layers or their tensors overlap, or leave gaps.
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        # Otherwise a table that a mechanism builds could add one layer's noise to another layer's
        # numbers.
        end = 0
        for layer in self.layers:
            start = end
            for slot in layer.slots:
                if slot.offset != end or slot.size != math.prod(slot.shape):
                    raise ConfigError(
                        f"layer table: {slot.name!r} does not lie where the tensors before it end"
                    )
                end += slot.size
            if (layer.offset, layer.size) != (start, end - start):
                raise ConfigError(
                    f"layer table: layer {layer.name!r} does not consist of its own tensors"
                )

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, group_by: str | Callable[[str], str] = "module"
    ) -> LayerTable:
        """Table of the trainable parameters of `module`.

        Frozen parameters and buffers (running statistics, counters) are omitted, because they are
        never trained, aggregated or uploaded. A tensor shared by several modules appears once,
        under its first name.

        Args:
            module: the model, which may be on the meta device.
            group_by: "module" puts the tensors of one module (weight and bias) into one layer,
                "tensor" makes every tensor a layer, "all" makes one layer of the whole model. For
                adapters (LoRA), "adapter" makes a layer of each adapted matrix, "factor" makes a
                layer of each factor of an adapter, and "kind" makes three layers: all A, all B, and
                the rest. A function maps a parameter's name to its layer's name. If `module` itself
                holds several tensors, they are the layer "model".

        Raises:
            ConfigError: the object is not a model, the grouping is unknown, or there is no
                trainable parameter.

        >>> module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        >>> LayerTable.from_module(module).sizes.tolist()
        [15, 8]
        """
        if not isinstance(module, torch.nn.Module):
            what = (
                f"the class {module.__name__}"
                if isinstance(module, type)
                else type(module).__name__
            )
            raise ConfigError(f"a model must be an nn.Module, got {what}")
        group = _grouping(group_by)
        grouped: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                with users_code("group_by", group):
                    layer = group(name)
                grouped.setdefault(layer, []).append((name, parameter))
        if not grouped:
            raise ConfigError(
                f"{type(module).__name__} has no trainable parameters: there is no layer to release"
            )
        layers, offset = [], 0
        for layer_name, members in grouped.items():
            start, slots = offset, []
            for name, parameter in members:
                slots.append(Slot(name, tuple(parameter.shape), offset, parameter.numel()))
                offset += parameter.numel()
            own_name = slots[0].name if len(slots) == 1 else "model"
            layers.append(Layer(layer_name or own_name, tuple(slots), start, offset - start))
        return cls(tuple(layers))

    @classmethod
    def from_sizes(cls, sizes: dict[str, int]) -> LayerTable:
        """Table of one-dimensional layers, for work on plain vectors and for tests."""
        layers, offset = [], 0
        for name, size in sizes.items():
            check_count(f"size of layer {name!r}", size)
            layers.append(Layer(name, (Slot(name, (size,), offset, size),), offset, size))
            offset += size
        return cls(tuple(layers))

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names, in order."""
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Size d_j of each layer, int64 [K], read-only."""
        return _read_only(np.array([layer.size for layer in self.layers], dtype=np.int64))

    @cached_property
    def _lengths(self) -> list[int]:
        return [layer.size for layer in self.layers]

    @cached_property
    def offsets(self) -> np.ndarray:
        """Layer boundaries in the flat vector, int64 [K + 1], read-only."""
        return _read_only(np.concatenate([[0], np.cumsum(self.sizes)]))

    @cached_property
    def size(self) -> int:
        """Length D of the flat vector."""
        return int(self.offsets[-1])

    def as_single_layer(self) -> LayerTable:
        """The same vector as a single layer, for the flat Gaussian mechanism. The layer keeps the
        sizes of the merged layers (`parts`).
        """
        slots = tuple(slot for layer in self.layers for slot in layer.slots)
        parts = tuple(size for layer in self.layers for size in layer.parts or (layer.size,))
        return LayerTable((Layer("all", slots, 0, self.size, parts),))

    def slots(self) -> Iterator[Slot]:
        """All slots in flat order."""
        for layer in self.layers:
            yield from layer.slots

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Views of the layers, for `flat` of shape [..., D]."""
        return flat.split(self._lengths, dim=-1)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """For each parameter name, a view into `flat` ([D], or [B, D] for a stack of models)."""
        lead = flat.shape[:-1]
        return {
            s.name: flat[..., s.offset : s.offset + s.size].view((*lead, *s.shape))
            for s in self.slots()
        }

    def flatten(self, module: torch.nn.Module) -> Tensor:
        """Copy of the module's parameters as one float32 vector [D]."""
        parameters = dict(module.named_parameters())
        return torch.cat(
            [parameters[s.name].detach().reshape(-1).to(torch.float32) for s in self.slots()]
        )

    def load_(self, module: torch.nn.Module, flat: Tensor) -> None:
        """Write `flat` [D] into the module's parameters, converted to the dtype of each
        parameter.
        """
        self._check(flat)
        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for slot in self.slots():
                parameters[slot.name].copy_(
                    flat[slot.offset : slot.offset + slot.size].view(slot.shape)
                )

    def bind_(self, module: torch.nn.Module) -> Tensor:
        """Move the module's float32 parameters into one new flat vector [D], and return this
        vector.

        Afterwards, a change of the vector changes the module, and the parameters can be read from
        it without a copy.

        Raises:
            ConfigError: a parameter is not float32 (use `flatten` and `load_`, which convert).
        """
        parameters = dict(module.named_parameters())
        for slot in self.slots():
            if parameters[slot.name].dtype != torch.float32:
                raise ConfigError(
                    f"cannot bind {slot.name} of {parameters[slot.name].dtype}: only float32 is "
                    "shared"
                )
        with torch.no_grad():
            flat = self.flatten(module)
            for name, view in self.unflatten(flat).items():
                parameters[name].data = view
        return flat

    def squared_norms(self, flat: Tensor) -> Tensor:
        """Squared l2 norm of each layer, float64 [K] for `flat` [D]; NaN or Inf if the layer holds
        NaN or Inf.
        """
        self._check(flat)
        squares = [_squared_norm(layer) for layer in self.split(flat.to(torch.float32))]
        return torch.tensor(squares, dtype=torch.float64)

    def norms(self, flat: Tensor, p: int = 2) -> Tensor:
        """The l2 (p=2) or l1 (p=1) norm of each layer, float64 [K] for `flat` [D].

        Raises:
            ConfigError: `p` is another number, or the vector has another length and p = 2.
        """
        if p not in (1, 2):
            raise ConfigError(f"norms must be l1 or l2, got p = {p}")
        if p == 2:
            return self.squared_norms(flat).sqrt()
        return torch.stack(
            [
                _chunks(layer).abs().sum(dim=-1).sum(dtype=torch.float64)
                for layer in self.split(flat)
            ]
        )

    def _check(self, flat: Tensor) -> None:
        if flat.shape != (self.size,):
            raise ConfigError(
                f"expected a flat vector of shape ({self.size},), got {tuple(flat.shape)}"
            )


def factor_of(name: str) -> str | None:
    """The factor, "A" or "B", of an adapter to which the parameter `name` belongs; None if it
    belongs to no adapter.

    Example:
        >>> factor_of("h.0.attn.lora_A.default.weight"), factor_of("h.0.mlp.weight")
        ('A', None)
    """
    match = _FACTOR.search(f".{name}")
    return match[1] if match else None


def adapted_layer(name: str) -> str:
    """Name of the layer that a parameter's adapter adapts; for a parameter outside adapters, the
    name of its module.

    Example:
        >>> adapted_layer("h.0.attn.lora_A.default.weight"), adapted_layer("head.weight")
        ('h.0.attn', 'head')
    """
    short = _FACTOR.sub("", f".{name}")[1:]
    return short if factor_of(name) else name.rpartition(".")[0]


def _read_only(array: np.ndarray) -> np.ndarray:
    """The array, made read-only. Otherwise a mechanism that sorted the sizes in place would move
    noise to other layers' coordinates.
    """
    array.setflags(write=False)
    return array


def _grouping(group_by: str | Callable[[str], str]) -> Callable[[str], str]:
    if callable(group_by):
        return group_by
    rules: dict[str, Callable[[str], str]] = {
        "module": lambda name: name.rpartition(".")[0],
        "tensor": lambda name: name,
        "all": lambda name: "all",
        "adapter": adapted_layer,
        "factor": lambda name: name.rpartition(".")[0],
        "kind": lambda name: factor_of(name) or "other",
    }
    if group_by not in rules:
        raise ConfigError(
            f"unknown layer grouping {group_by!r}; known: {', '.join(rules)}, or a function of the "
            "name"
        )
    return rules[group_by]


def _chunks(vector: Tensor) -> Tensor:
    """The vector as rows of at most `_CHUNK` elements, padded with zeros, so that float32 sums are
    accurate in layers of any size.
    """
    vector = vector.to(torch.float32)
    full_size = vector.numel() - vector.numel() % _CHUNK
    if full_size == 0 or full_size == vector.numel():
        return vector.view(-1, _CHUNK) if full_size else vector.view(1, -1)
    return torch.nn.functional.pad(vector, (0, _CHUNK - vector.numel() % _CHUNK)).view(-1, _CHUNK)


def _squared_norm(vector: Tensor) -> float:
    """Squared norm, computed with Python numbers where possible, because every call of PyTorch
    takes some microseconds for each layer and client.
    """
    full_size = vector.shape[0] - vector.shape[0] % _CHUNK
    rest = float(torch.linalg.vector_norm(vector[full_size:]))
    if not full_size:
        return rest * rest
    rows = torch.linalg.vector_norm(vector[:full_size].view(-1, _CHUNK), dim=1)
    return rest * rest + float(rows.double().square().sum())
