"""One forward and backward pass of a micro-batch. In the backward pass, the rule of a layer's type
clips and sums the layer's per-example gradients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.planning.clipping import Scaling
from fedlgm.training.example_level.generic import GenericSite
from fedlgm.training.example_level.norms import norm_of
from fedlgm.training.example_level.rules import Kept, KeptGradients, Rule, Use
from fedlgm.training.example_level.rules.rule import all_finite
from fedlgm.training.example_level.scaling import PerLayerClip


@dataclass(frozen=True)
class Place:
    """Offset and size of a parameter in the flat vector, and the index of the parameter's layer
    (`column`).
    """

    offset: int
    size: int
    column: int


class Site:
    """A module with a rule."""

    def __init__(self, rule: Rule, places: dict[int, Place]) -> None:
        self.rule, self.module, self.name = rule, rule.module, rule.name
        parameters = dict(self.module.named_parameters(recurse=False))
        rule.parameters = [key for key in rule.parameters if id(parameters[key]) in places]
        self.places = [places[id(parameters[key])] for key in rule.parameters]


class Total:
    """Sum of the scaled gradients, a flat vector. The range of a parameter is set to zero only at
    its first use, so that it takes no memory while the activations of the backward pass still need
    the memory.

    Args:
        size: D.
        dtype: dtype of the sums.
        device: device of the parameters.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sum = torch.empty(size, dtype=dtype, device=device)
        self._begun: set[int] = set()
        self.dtype, self.device = dtype, device

    def part(self, place: Place) -> Tensor:
        """The sum of one parameter's gradients so far, to which callers add in place."""
        part = self._sum[place.offset : place.offset + place.size]
        if place.offset not in self._begun:
            self._begun.add(place.offset)
            part.zero_()
        return part

    def vector(self, places: Iterable[Place]) -> Tensor:
        """The complete sum [D]."""
        for place in places:
            self.part(place)
        return self._sum


class Pass:
    """Forward and backward pass of one micro-batch.

    Attributes:
        anchor: scalar on which all fused layers depend, so that autograd reaches each of them.
    """

    def __init__(
        self,
        sites: Sequence[Site | GenericSite],
        places: dict[int, Place],
        scaling: Scaling,
        total: Total,
        squares: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._dtype = dtype
        self.anchor = torch.zeros((), dtype=dtype, device=total.device, requires_grad=True)
        self._scaling, self._total, self._squares, self._norm = (
            scaling,
            total,
            squares,
            norm_of(scaling),
        )
        self._uses, self._calls = Counter[int](), Counter[Site | GenericSite]()
        self._members = Counter(place.column for place in places.values())
        self._waiting: list[tuple[Site, Kept]] = []
        self._several: dict[Site, list[Use]] = {}
        self._whole: dict[int, tuple[Place, Tensor]] = {}
        self._unrecorded: list[Site | GenericSite] = []
        self._started = False

    def call(self, site: Any, *arguments: Any, **named: Any) -> Any:
        """Compute the forward pass of a site. For a site with a rule, the argument is one tensor
        that joins all inputs, and the result is the output of the rule's `forward`.

        Raises:
            ConfigError: the site is called during the backward pass, or the first dimension is not
                the example.
        """
        if not torch.is_grad_enabled():
            self._unrecorded.append(site)
            return call_without_graph(site, *arguments, **named)
        if self._started:
            raise ConfigError(
                f"{site.name} is called during the backward pass: activation checkpointing is not "
                "supported"
            )
        self._uses.update(place.offset for place in site.places)
        self._calls[site] += 1
        if isinstance(site, GenericSite):
            return site.call(len(self._squares), arguments, named)
        (x,) = arguments
        if site.rule.shares(x):
            x = x.expand(len(self._squares), *x.shape[1:])
        if len(x) != len(self._squares):
            raise ConfigError(
                f"{site.name} got {len(x)} rows for {len(self._squares)} examples: the first "
                "dimension must be the example"
            )
        return _Fused.apply(site.rule.prepare(x), self.anchor, site, self)

    def start(self) -> None:
        """End the forward pass, after which the number of uses of every parameter is known.

        Raises:
            ConfigError: a trained layer ran only where autograd records no gradient.
        """
        self._started = True
        for site in self._unrecorded:
            if site in self._calls:
                continue
            raise ConfigError(
                f"{site.name} is trained, but its forward pass records no gradient: it runs under "
                "torch.no_grad, or in activation checkpointing, which is not supported; freeze it "
                "(requires_grad_(False)) or let it run with gradients"
            )

    def backward(self, site: Site, use: Use) -> None:
        """Process the gradients of a site for one of its uses: add them now or keep them until
        `finish`.

        Raises:
            ConfigError: the forward pass itself computes a gradient, which would wrongly be added
                to the sum.
        """
        if not self._started:
            raise ConfigError(
                f"the forward pass takes a gradient through {site.name}, so the gradient of an "
                "example cannot be computed there: compute such terms without torch.autograd"
            )
        if not site.places:
            return
        uses = max(self._uses[place.offset] for place in site.places)
        if self._norm.fused and uses == 1:
            self._add_use(site, use)
        elif self._norm.fused and site.rule.unites and uses == self._calls[site]:
            self._several.setdefault(site, []).append(use)
        else:
            for place, gradients in zip(site.places, site.rule.instantiate(use), strict=True):
                self._add_whole(place, gradients)

    def _add_use(self, site: Site, use: Use) -> None:
        """Measure a site's gradients for its only use, or for its united uses. Add them now, or
        keep them until the end of the pass.
        """
        members = Counter(place.column for place in site.places)
        alone = all(self._members[column] == count for column, count in members.items())
        if isinstance(self._scaling, PerLayerClip) and alone:
            site.rule.immediately(
                use, self._sums(site), _PerLayer(site, self._scaling, self._squares, self._dtype)
            )
            return
        record = site.rule.keep(use)
        for place, squares in zip(site.places, record.squares, strict=True):
            self._squares[:, place.column] += squares
        self._waiting.append((site, record))

    @torch.no_grad()
    def generic(self, site: GenericSite, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients [n, ...] of a generic site until `finish`."""
        for place, gradient in zip(site.places, gradients, strict=True):
            if gradient is not None:
                self._add_whole(place, gradient.reshape(len(gradient), -1))

    @torch.no_grad()
    def finish(self) -> None:
        """Scale and add the gradients that were kept until the end of the backward pass."""
        for site, uses in self._several.items():
            self._add_use(site, site.rule.unite(uses))
        for place, gradients in self._whole.values():
            self._squares[:, place.column] += self._norm.amounts(gradients)
        if not self._waiting and not self._whole:
            return
        norms = self._norm.of(self._squares)
        finite = torch.isfinite(norms)
        finite_norms = torch.where(finite, norms, 0.0)
        factors = self._scaling.factors(finite_norms)
        if isinstance(self._scaling, PerLayerClip):
            counted = finite
        else:
            counted = finite.all(dim=1, keepdim=True)
        factors = cast(torch.where(counted, factors, 0.0), self._dtype)
        for site, record in self._waiting:
            record.add(
                self._sums(site), [factors[:, place.column].contiguous() for place in site.places]
            )
        for place, gradients in self._whole.values():
            column = self._squares[:, place.column]
            KeptGradients([gradients], [column]).add(
                [self._total.part(place)], [factors[:, place.column].contiguous()]
            )

    def _sums(self, site: Site) -> list[Tensor]:
        return [self._total.part(place) for place in site.places]

    def _add_whole(self, place: Place, gradients: Tensor) -> None:
        if place.offset in self._whole:
            gradients = self._whole[place.offset][1] + gradients
        self._whole[place.offset] = (place, gradients)


class _PerLayer:
    """Computes the factors of one site's gradients from the norms in each layer, and records the
    squared norms.
    """

    def __init__(
        self, site: Site, scaling: PerLayerClip, squares: Tensor, dtype: torch.dtype
    ) -> None:
        self._columns, self._scaling, self._squares = (
            [p.column for p in site.places],
            scaling,
            squares,
        )
        self._dtype = dtype

    def __call__(self, rows: slice, squares: Sequence[Tensor]) -> list[Tensor]:
        by_column: dict[int, Tensor] = {}
        for column, square in zip(self._columns, squares, strict=True):
            by_column[column] = by_column[column] + square if column in by_column else square
        factors = {}
        for column, square in by_column.items():
            self._squares[rows, column] = square
            norms = square.sqrt()
            if all_finite(square):
                column_factors = self._scaling.factors_of(column, norms)
            else:
                finite = torch.isfinite(norms)
                column_factors = torch.where(
                    finite, self._scaling.factors_of(column, norms.where(finite, 0.0)), 0.0
                )
            factors[column] = cast(column_factors, self._dtype)
        return [factors[column] for column in self._columns]


def call_without_graph(site: Site | GenericSite, *arguments: Any, **named: Any) -> Any:
    """Compute the same outputs as `Pass.call`, without recording by autograd."""
    if isinstance(site, GenericSite):
        return type(site.module).forward(site.module, *arguments, **named)
    return site.rule.forward(site.rule.prepare(*arguments))[0]


def cast(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert factors to the gradients' precision. Subnormal factors become 0, because rounding
    could double them.
    """
    return torch.threshold(factors, math.nextafter(torch.finfo(dtype).tiny, 0.0), 0.0).to(dtype)


class _Fused(torch.autograd.Function):
    """A layer's forward and backward pass. The backward pass gives the output's gradient to
    `Pass.backward`, and returns the gradient of the input but not the gradients of the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, site: Site, work: Pass) -> Tensor:  # type: ignore[override]
        out, saved = site.rule.forward(x)
        ctx.save_for_backward(x, *saved)
        ctx.site, ctx.work = site, work
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        use = Use(x.detach(), gradients[0], tuple(saved))
        ctx.work.backward(ctx.site, use)
        return (
            ctx.site.rule.input_gradient(use) if ctx.needs_input_grad[0] else None,
            None,
            None,
            None,
        )
