"""Per-example gradients of any module, computed under `torch.func.vmap` with one row of expanded
parameters for every example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from fedlgm.errors import ConfigError
from fedlgm.extension.restored import Restored, restored_around
from fedlgm.training.devices import fork_rng
from fedlgm.training.example_level.on_batch import call_on_batch
from fedlgm.training.example_level.rules import refuse_packed


class GenericSite:
    """A module that has no rule, together with all modules inside it.

    The parameters are expanded to tensors [n, ...] that are leaves of autograd's graph, so that
    autograd computes one gradient per example. A module that `torch.func.vmap` does not support,
    such as a recurrent module, is called example by example.

    Args:
        module: a module whose inputs have the example as their first dimension; in its outputs, any
            dimension may be the example.
        name: name of the module.
        places: positions of the trained parameters in the flat vector, by the `id` of the
            parameter.

    Attributes:
        of_row: the parameters for one row, while `call_row` runs under vmap.
    """

    of_row: Mapping[str, Tensor]

    def __init__(self, module: nn.Module, name: str, places: Mapping[int, Any]) -> None:
        self.module, self.name = module, name
        self._own = {key: value for key, value in module.named_parameters() if id(value) in places}
        self.places = [places[id(value)] for value in self._own.values()]
        self._direct = _Direct(module)
        self._restored = Restored.of(module, None)
        self._leaves: dict[str, Tensor] = {}
        self._looped = False
        self._axes: list[int] | None = None
        self._batched: list[bool] | None = None

    def leaves(self) -> list[Tensor]:
        """The expanded parameters of the current forward pass; empty before the pass."""
        return list(self._leaves.values())

    def clear(self) -> None:
        """Drop the expanded parameters of the forward pass."""
        self._leaves = {}

    def observe(self, examples: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Determine which arguments have an example dimension. An argument has one if its length is
        the number of examples in this call.
        """
        self._batched = self._of_examples(examples, pytree.tree_leaves((arguments, named)))

    def expand(self, examples: int) -> dict[str, Tensor]:
        """Create new expanded parameters [n, ...], with one row for each example."""
        self._leaves = {
            key: value.detach().expand(examples, *value.shape).requires_grad_()
            for key, value in self._own.items()
        }
        return self._leaves

    def call_row(self, row: Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute the forward pass for one row under vmap, with the parameters `of_row`. `row` may
        be any tensor of the row.
        """
        if not self._looped:
            try:
                return self._original(self.of_row, arguments, named)
            except (RuntimeError, ValueError):
                self._looped = True
        values, spec = pytree.tree_flatten((arguments, named))
        places = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        keys, structure = list(self.of_row), list[Any]()

        def run(*stacked: Tensor) -> tuple[Tensor, ...]:
            rows = []
            for of_example in zip(*(value.unbind() for value in stacked), strict=True):
                flat = list(values)
                for i, value in zip(places, of_example[len(keys) :], strict=True):
                    flat[i] = value.clone()
                own_arguments, own_named = pytree.tree_unflatten(flat, spec)
                parameters = dict(zip(keys, of_example, strict=False))
                outputs, shape = pytree.tree_flatten(
                    self._original(parameters, own_arguments, own_named)
                )
                structure[:] = [shape]
                rows.append(outputs)
            return tuple(torch.stack(column) for column in zip(*rows, strict=True))

        tensors = [values[i] for i in places]
        outputs = call_on_batch(run, row, *(self.of_row[key] for key in keys), *tensors)
        return pytree.tree_unflatten(list(outputs), structure[0])

    def call(self, examples: int, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Compute the forward pass, recorded by autograd, for arguments whose first dimension is
        the example.

        Raises:
            ConfigError: an argument is a packed sequence, which joins the rows of a batch.
        """
        if not self._leaves:
            self.expand(examples)
        refuse_packed(self.module, self.name, (*arguments, *named.values()))
        values, spec = pytree.tree_flatten((arguments, named))
        batched = self._batched or self._of_examples(examples, values)
        shape: list[Any] = []

        def run(parameters: Mapping[str, Tensor], values: Sequence[Any]) -> list[Any]:
            own_arguments, own_named = pytree.tree_unflatten(list(values), spec)
            outputs, structure = pytree.tree_flatten(
                self._original(parameters, own_arguments, own_named)
            )
            shape[:] = [structure, outputs]
            return [value for value in outputs if isinstance(value, Tensor)]

        axes = self._find_axes(run, values, batched)
        results = None
        if not self._looped:
            try:
                results = self._vmap(run, values, batched, axes)
            except (RuntimeError, ValueError):
                self._looped = True
        if results is None:
            results = self._one_by_one(run, values, batched, axes)
        tensors = iter(results)
        structure, outputs = shape
        return pytree.tree_unflatten(
            [next(tensors) if isinstance(value, Tensor) else value for value in outputs], structure
        )

    def _vmap(
        self,
        run: Callable[..., list[Any]],
        values: Sequence[Any],
        batched: Sequence[bool],
        axes: Sequence[int],
    ) -> list[Tensor]:
        def run_one(parameters: dict[str, Tensor], *arguments: Any) -> tuple[Tensor, ...]:
            batch_of_one = [
                value[None] if is_batched else value
                for value, is_batched in zip(arguments, batched, strict=True)
            ]
            return tuple(
                value.squeeze(axis)
                for value, axis in zip(run(parameters, batch_of_one), axes, strict=True)
            )

        dims = tuple(0 if is_batched else None for is_batched in batched)
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no rule for vmap
            mapped = torch.func.vmap(
                run_one, in_dims=(0, *dims), out_dims=tuple(axes), randomness="different"
            )
            return list(mapped(self._leaves, *values))

    def _one_by_one(
        self,
        run: Callable[..., list[Any]],
        values: Sequence[Any],
        batched: Sequence[bool],
        axes: Sequence[int],
    ) -> list[Tensor]:
        copies = {key: value.unbind() for key, value in self._leaves.items()}
        rows = []
        for i in range(len(next(iter(copies.values())))):
            batch_of_one = [
                v[i : i + 1] if is_batched else v
                for v, is_batched in zip(values, batched, strict=True)
            ]
            rows.append(run({key: value[i] for key, value in copies.items()}, batch_of_one))
        return [
            torch.cat(parts, dim=axis)
            for parts, axis in zip(zip(*rows, strict=True), axes, strict=True)
        ]

    def _find_axes(
        self, run: Callable[..., list[Any]], values: Sequence[Any], batched: Sequence[bool]
    ) -> Sequence[int]:
        """Find the examples' dimension in each output, which is the dimension that grows with the
        number of examples.
        """
        if self._axes is None:
            shapes = []
            with torch.no_grad(), fork_rng(None):
                for count in (1, 2):
                    few = [
                        v[:1].expand(count, *v.shape[1:]) if is_batched else v
                        for v, is_batched in zip(values, batched, strict=True)
                    ]
                    shapes.append([value.shape for value in run(self._own, few)])
            axes = []
            for one, two in zip(*shapes, strict=True):
                grown = [
                    i for i, (a, b) in enumerate(zip(one, two, strict=True)) if (a, b) == (1, 2)
                ]
                if len(grown) != 1 or len(one) != len(two):
                    raise ConfigError(
                        f"{self.name or 'the module'} ({type(self.module).__name__}) returns "
                        f"{tuple(one)} for one example and {tuple(two)} for two: it needs one "
                        "dimension for the example"
                    )
                axes.append(grown[0])
            self._axes = axes
        return self._axes

    def _of_examples(self, examples: int, values: Sequence[Any]) -> list[bool]:
        return [
            isinstance(value, Tensor) and value.dim() > 0 and len(value) == examples
            for value in values
        ]

    def _original(
        self, parameters: Mapping[str, Tensor], arguments: Sequence[Any], named: dict[str, Any]
    ) -> Any:
        named_parameters = {f"module.{key}": value for key, value in parameters.items()}
        patched = vars(self.module).pop("forward", None)
        try:
            with restored_around(self._restored):  # because a loop may call the module row by row
                return torch.func.functional_call(
                    self._direct, named_parameters, tuple(arguments), named
                )
        finally:
            if patched is not None:
                self.module.forward = patched  # type: ignore[method-assign]


class _Direct(nn.Module):
    """A wrapper that calls a module's `forward` without the module's hooks, because the surrounding
    call of the module already runs the hooks.

    Args:
        module: the module; its `forward` may be the method of the class or a replacement.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._forward = module.forward

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Compute the module's outputs. Unlike `nn.Module.__call__`, this method runs no global
        hooks.
        """
        return self._forward(*arguments, **named)
