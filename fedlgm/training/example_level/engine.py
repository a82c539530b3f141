"""Sums of clipped per-example gradients, at about the cost of an ordinary backward pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError, Notice
from fedlgm.extension.operations import own_vmap_rule
from fedlgm.extension.restored import Restored, restored_around
from fedlgm.extension.separation import shared_state
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.layers import LayerTable
from fedlgm.training import tasks
from fedlgm.training.devices import exact_arithmetic, fork_rng, keep_freed_memory
from fedlgm.training.example_level.generic import GenericSite
from fedlgm.training.example_level.norms import norm_of
from fedlgm.training.example_level.passes import Pass, Place, Site, Total
from fedlgm.training.example_level.pooling import max_pool, suits
from fedlgm.training.example_level.row_losses import RowLosses
from fedlgm.training.example_level.rules import require_rows, rule_for
from fedlgm.training.example_level.rules.rule import all_finite
from fedlgm.training.example_level.scaling import FlatClip, PerLayerClip, one_by_one
from fedlgm.training.example_level.separation import MappedRows, Separation, TriedRows, separate
from fedlgm.training.example_level.stack import StackPass
from fedlgm.training.inputs import parts
from fedlgm.training.models.built import Built, refuse_gradient_hooks
from fedlgm.training.models.requirements import Frozen
from fedlgm.training.stack.tape import Memory
from fedlgm.training.tasks.task import ExampleLosses

ACTIVATION_BYTES = 8 << 20
"""Target for the size in bytes of the largest activation of a micro-batch. For larger tensors, the
operating system maps new memory at every allocation, which is slow.
"""
PASS_BYTES = 320 << 20
"""Target for the total size in bytes of the inputs and outputs of all layers in a micro-batch. The
target is half of this value if gradients can be scaled and summed only after the backward pass.
"""
STORED_BYTES = 128 << 20
"""Limit for the size in bytes of a micro-batch's per-example gradients that are in memory at the
same time.
"""
_KEPT = "conditional on no part of the model or task keeping what it has seen (tested on a few examples)"
_RULE = "conditional on no rule for vmap joining rows (tested on a few examples)"
_PRECISE = (torch.float32, torch.float64)
_BOTH, _EACH = slice(2), (slice(1), slice(1, 2))


@dataclass(frozen=True)
class ClippedSum:
    """The clipped sum of one batch, with the norms of the gradients before clipping.

    Attributes:
        total: sum of the examples' scaled gradients [D], in the order of the layer table, and in
            float64 with `exact_sums`.
        norms: norm of each example's gradient in each layer before scaling, float64 [B, K]. It is
            the norm that the scaling bounds, which is the l2 norm by default. NaN or Inf where the
            gradient is not finite. SENSITIVE: no noise protects these norms, so use them only for
            internal diagnostics.
        discarded: number of examples with a gradient that is not finite; such a gradient counts as
            zero. SENSITIVE: no noise protects this number.

    Example:
        >>> from fedlgm.training.example_level.scaling import of_style
        >>> model, scaling = nn.Linear(2, 3), of_style("flat", 0.1, 1)
        >>> gradients = ExampleGradients(model, LayerTable.from_module(model))
        >>> x, y = torch.tensor([[1.0, 2.0], [math.nan, 0.0]]), torch.tensor([0, 1])
        >>> result: ClippedSum = gradients.sum(x, y, scaling)
        >>> result.discarded, result.norms.shape, round(float(result.total.norm()), 4)
        (1, torch.Size([2, 1]), 0.1)
    """

    total: Tensor
    norms: Tensor
    discarded: int


class SumsExamples(Protocol):
    """An object that sums clipped per-example gradients: `ExampleGradients` or
    `NativeExampleGradients`.

    Example:
        >>> from fedlgm.training.example_level.scaling import of_style
        >>> model = nn.Linear(2, 3)
        >>> gradients: SumsExamples = ExampleGradients(model, LayerTable.from_module(model))
        >>> gradients.sum(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]), of_style("flat", 0.1, 1)).total.shape
        torch.Size([9])
    """

    def sum(self, x: Any, y: Any, scaling: Scaling) -> ClippedSum:
        """Compute the clipped sum of one batch."""

    def sums(self, batches: Iterable[tuple[Any, Any]], scaling: Scaling) -> list[ClippedSum]:
        """Compute the clipped sums of several batches, one after another."""

    def condition(self, x: Any) -> str:
        """Assumptions about the module under which a guarantee holds, for inputs [n, ...] with the
        dimensions of `x`; empty if the guarantee needs no assumptions.
        """


class ExampleGradients:
    """Computes, clips and sums the per-example gradients of a module, without storing the gradients
    of all examples.

    For Linear, Conv1d, Conv2d, Embedding, LayerNorm, GroupNorm, and LSTM and GRU (batch first, in
    one direction), clipping and summing are fused into the backward pass. If layers share a
    parameter, an example's gradient with respect to this parameter is the sum over these layers.
    For every other module with parameters, `torch.func` computes per-example gradients, which is
    slower; the constructor gives a notice if there are such modules.

    Args:
        module: any module whose inputs and outputs have the example as first dimension, and in
            which examples do not influence each other.
        layers: the module's layer table, with any grouping of parameters into layers.
        task: the task, which gives the loss of each example; None means classification.
        micro_batch: maximum number of examples per pass. With None, the number is chosen from the
            sizes of the activations and of the stored gradients. The choice affects results only by
            rounding.
        exact_sums: whether to sum the gradients in float64, which takes longer. The difference
            between two sums of n examples that differ in one example then exceeds this example's
            contribution by at most n^2 2^-52 times the bound. For sums in float32, the excess is up
            to n^2 2^-23 times the bound. The gradients themselves are computed in the precision of
            the parameters.

    Raises:
        ConfigError: examples influence each other, as in BatchNorm in training mode; gradients have
            hooks; the module lacks parameters of the layer table; its parameters have several
            dtypes or a lower precision than float32; or `micro_batch` is below 1.

    Example:
        >>> from fedlgm.training.example_level.scaling import of_style
        >>> model, x, y = nn.Linear(2, 3), torch.randn(8, 2), torch.randint(3, (8,))
        >>> gradients = ExampleGradients(model, LayerTable.from_module(model))
        >>> plain = torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), model.parameters())
        >>> unclipped = gradients.sum(x, y, of_style("flat", math.inf, 1)).total
        >>> torch.allclose(unclipped, torch.cat([g.flatten() for g in plain]), atol=1e-5)
        True
    """

    def __init__(
        self,
        module: nn.Module,
        layers: LayerTable,
        task: ExampleLosses | None = None,
        micro_batch: int | None = None,
        exact_sums: bool = False,
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ConfigError(f"micro_batch must be at least 1, got {micro_batch}")
        self._module, self._layers = module, layers
        self._task: ExampleLosses = task if task is not None else tasks.get()
        self._micro_batch, self._exact_sums, self._probed = micro_batch, exact_sums, False
        parameters = dict(module.named_parameters())
        missing = [slot.name for slot in layers.slots() if slot.name not in parameters]
        if missing:
            raise ConfigError(
                f"the layer table names {missing[0]!r}, which the module does not have"
            )
        trained = {id(parameters[slot.name]): slot for slot in layers.slots()}
        dtypes = {parameters[slot.name].dtype for slot in layers.slots()}
        if len(dtypes) > 1:
            raise ConfigError(f"the parameters must have one dtype, got {sorted(map(str, dtypes))}")
        self._parameters = {slot.offset: parameters[slot.name] for slot in layers.slots()}
        self._dtype = dtypes.pop()
        if self._dtype not in _PRECISE:
            raise ConfigError(
                f"the parameters must be float32 or float64, got {self._dtype}: norms and sums of "
                "lower precision exceed the bounds of the gradients"
            )
        column = {slot.offset: j for j, layer in enumerate(layers.layers) for slot in layer.slots}
        self._places = {
            key: Place(slot.offset, slot.size, column[slot.offset]) for key, slot in trained.items()
        }
        _refuse_batch_norm(module)
        refuse_gradient_hooks(module)
        keep_freed_memory()
        self._built, self._restored = Built(module), Restored.of(module, None)
        self._separation: Separation | None = None
        self._dimensions: tuple[int, ...] | None = None  # of the inputs for `_separation`
        shared = shared_state(module, self._task)
        self._kept = "" if shared is None else f"{_KEPT}: {shared}"
        rule = own_vmap_rule(model=module, task=self._task)
        self._rule = "" if rule is None else f"{_RULE}: {rule} has its own"
        self._row_losses = RowLosses(self._task, module.parameters())
        self._memory = Memory(self._dtype, next(iter(self._parameters.values())).device)
        self._shared: set[str] = set()
        self._sites: list[Site | GenericSite] = []
        self._pools: list[Any] = [child for child in module.modules() if suits(child)]
        self._find(module, "")
        self._generic = [site for site in self._sites if isinstance(site, GenericSite)]
        # A method of this object would create a reference cycle through `_separation`. The cycle
        # would keep the model in memory until Python's garbage collector runs.
        self._replace_forward = partial(_replace_forward, self._sites, self._pools, self._restored)
        self._announce()
        self._stack = StackPass.of(module, self._sites, self._task)

    def condition(self, x: Any) -> str:
        """Assumptions about the module and the task under which a guarantee holds; empty if, by
        construction, neither rows nor steps can influence each other.

        Args:
            x: inputs of at least one example [n, ...], in the same form as for `sum`; their values
                do not matter.
        """
        return "; ".join(filter(None, (self._separate(parts(x)).condition, self._rule, self._kept)))

    @property
    def generic(self) -> tuple[str, ...]:
        """Names of the modules whose per-example gradients are computed by the generic, slower
        method.
        """
        return tuple(site.name for site in self._generic)

    def sum(self, x: Any, y: Any, scaling: Scaling) -> ClippedSum:
        """Scale and sum the gradients of a batch.

        Args:
            x: inputs [B, ...] (a tensor, or a tuple of tensors for a module with several inputs); B
                may be 0.
            y: targets [B, ...].
            scaling: rule that computes the factors by which the gradients are multiplied.

        Returns:
            The sum, the norms and the number of examples that counted as zero.

        Raises:
            ConfigError: examples influence each other, a parameter is used outside the module that
                owns it, the numbers of targets and inputs differ, or the module was changed after
                this object was created.
        """
        self._built.check()
        scaling = one_by_one(scaling)
        inputs = parts(x)
        _require_pairs(inputs, y)
        batch, dtype = inputs[0].shape[0], torch.float64 if self._exact_sums else self._dtype
        if (
            self._stack is not None
            and self._stack.takes(inputs, scaling)
            and 0 < batch <= self._most(inputs, scaling)
        ):
            self._probe(inputs, y)
            sums = self._stack.sum(inputs[0], y, scaling, dtype)
            if sums is not None:
                return ClippedSum(*sums, 0)
        _refuse_batch_norm(self._module)
        device = next(iter(self._parameters.values())).device
        total = Total(self._layers.size, dtype, device)
        squares = torch.zeros(batch, len(self._layers), dtype=torch.float64, device=device)
        if batch:
            with exact_arithmetic(device):
                step = math.ceil(batch / math.ceil(batch / self._most(inputs, scaling)))
                self._probe(inputs, y)
                for low in range(0, batch, step):
                    rows = slice(low, min(low + step, batch))
                    self._pass(
                        tuple(value[rows] for value in inputs),
                        y[rows],
                        scaling,
                        total,
                        squares[rows],
                    )
            for site in self._sites:
                if isinstance(site, Site):
                    site.rule.finish([total.part(place) for place in site.places])
        norms = norm_of(scaling).of(squares)
        discarded = 0 if all_finite(squares) else int((~torch.isfinite(norms)).any(dim=1).sum())
        return ClippedSum(total.vector(self._places.values()), norms, discarded)

    def sums(self, batches: Iterable[tuple[Any, Any]], scaling: Scaling) -> list[ClippedSum]:
        """Compute the clipped sums of several batches, one after another. Each sum uses the weights
        that the module has when `batches` yields the batch.
        """
        return [self.sum(x, y, scaling) for x, y in batches]

    def _find(self, module: nn.Module, name: str) -> None:
        """Collect the outermost modules that directly own trained parameters. A module with a rule
        becomes a `Site`, and any other module a `GenericSite`.
        """
        parameters = [
            value for value in module.parameters(recurse=False) if id(value) in self._places
        ]
        rule = rule_for(module)
        if parameters and rule is None:
            self._sites.append(GenericSite(module, name, self._places))
        elif parameters and rule is not None:
            self._sites.append(Site(rule(module, self._memory, name), self._places))
        else:
            for key, child in module.named_children():
                is_site = any(site.module is child for site in self._sites)
                if not is_site:
                    self._find(child, f"{name}.{key}" if name else key)

    def _announce(self) -> None:
        sites = [f"{s.name or 'the module'} ({type(s.module).__name__})" for s in self._generic]
        if sites:
            shown = ", ".join(sites[:4]) + (f" and {len(sites) - 4} more" if len(sites) > 4 else "")
            warnings.warn(
                Notice(f"slower, generic per-example gradients are used for {shown}"), stacklevel=3
            )

    def _most(self, inputs: tuple[Tensor, ...], scaling: Scaling) -> int:
        """Largest number of examples that one pass processes."""
        return self._micro_batch or self._choose(
            inputs, isinstance(scaling, PerLayerClip), norm_of(scaling).fused
        )

    def _pass(
        self, x: tuple[Tensor, ...], y: Tensor, scaling: Scaling, total: Total, squares: Tensor
    ) -> None:
        """Process one micro-batch: add its scaled gradients to `total` and its squared norms to
        `squares` [n, K].
        """
        for site in self._generic:
            site.clear()  # an earlier pass may have failed halfway
        work = Pass(self._sites, self._places, scaling, total, squares, self._dtype)
        losses = self._row_losses(self._separate(x).outputs(x, work.call), y)
        work.start()
        parameters = list(self._parameters.values())
        leaves = [leaf for site in self._generic for leaf in site.leaves()]
        gradients = torch.autograd.grad(
            losses.sum(), [work.anchor, *leaves, *parameters], allow_unused=True
        )
        for gradient, slot in zip(gradients[1 + len(leaves) :], self._layers.slots(), strict=True):
            if gradient is not None:
                raise ConfigError(
                    f"the parameter {slot.name!r} is used outside the module that owns it, where "
                    "its per-example gradient cannot be computed: call the module instead, or "
                    "keep such terms out of the loss"
                )
        generic = iter(gradients[1 : 1 + len(leaves)])
        for site in self._generic:
            work.generic(site, [next(generic) for _ in site.leaves()])
            site.clear()
        work.finish()

    def _separate(self, inputs: tuple[Tensor, ...]) -> Separation:
        dimensions = tuple(value.dim() for value in inputs)
        if self._separation is None or self._dimensions not in (None, dimensions):
            self._dimensions = dimensions
            self._separation = separate(self._module, self._sites, inputs, self._replace_forward)
            if isinstance(self._separation, TriedRows):
                reason = f"{self._separation.condition} ({self._separation.reason})"
                warnings.warn(Notice(f"the guarantee is {reason}"), stacklevel=4)
        return self._separation

    def _choose(self, inputs: tuple[Tensor, ...], per_layer: bool, fused: bool) -> int:
        """Choose the number of examples in a micro-batch from the largest activation, the total
        size of the activations and the size of the stored gradients of one example.
        """
        shapes = (per_layer, fused, *(value.shape[1:] for value in inputs))
        if getattr(self, "_chosen", (None, 0))[0] != shapes:
            seen: list[int] = []
            self._separate(inputs)
            with torch.no_grad(), self._replace_forward(_observer(seen, lambda *_: None)):
                self._module(*(value[:1] for value in inputs))
            stored_sites = [
                site for site in self._sites if isinstance(site, GenericSite) or not fused
            ]
            stored = sum(place.size for site in stored_sites for place in site.places)
            size = torch.empty(0, dtype=self._dtype).element_size()
            limit = PASS_BYTES if per_layer else PASS_BYTES // 2
            step = min(
                ACTIVATION_BYTES // (size * max(seen, default=1)),
                limit // (size * max(sum(seen), 1)),
            )
            step = max(1, step)
            if stored:
                step = min(step, max(1, STORED_BYTES // (size * stored)))
            self._chosen = (shapes, step)
        return self._chosen[1]

    def _probe(self, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Refuse a module if a first dimension is not the example, or if examples influence each
        other.
        """
        if self._probed or len(inputs[0]) < 2 or isinstance(self._separate(inputs), MappedRows):
            return
        before = [site.module.training for site in self._sites]
        both = [self._observe(tuple(value[[0, second]] for value in inputs)) for second in (1, 0)]
        assert before == [site.module.training for site in self._sites]
        for (name, rows), (_, other) in zip(*both, strict=True):
            if len(rows) != 2 and name not in self._shared:
                raise ConfigError(
                    f"{name} got {len(rows)} rows for a batch of 2: the first dimension must be the "
                    "example throughout"
                )
            if not torch.allclose(rows[0], other[0], rtol=1e-5, atol=1e-6, equal_nan=True):
                raise ConfigError(
                    f"examples influence each other before or in {name}, so no example has a "
                    "separate gradient"
                )
        if self._shared:
            self._require_own_gradients(tuple(value[:2] for value in inputs), y[:2])
        self._probed = True

    def _require_own_gradients(self, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        """Refuse a model if an input is shared by all examples, but the model treats its rows
        differently, for example by using only the first row.

        In the forward pass, all rows of such an input contain the same numbers, but in the backward
        pass each row carries the gradient of a different example.
        """
        together, *alone = (
            self._norms(tuple(v[rows] for v in inputs), y[rows]) for rows in (_BOTH, *_EACH)
        )
        apart = torch.cat(alone)
        tolerance = 1e-2 * apart.nan_to_num(0.0, 0.0, 0.0).norm(dim=1, keepdim=True)
        if bool(((together - apart).abs() > tolerance).any()):
            raise ConfigError(
                f"{', '.join(sorted(self._shared))} gets one row for the whole batch, but not "
                "every example uses this row in the same way: pass one row per example, as in "
                "positions.expand(len(x), -1)"
            )

    def _norms(self, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """Compute the norm of each example's gradient in each layer [n, K], and discard the sum of
        the gradients.
        """
        device = next(iter(self._parameters.values())).device
        squares = torch.zeros(len(y), len(self._layers), dtype=torch.float64, device=device)
        total = Total(self._layers.size, self._dtype, device)
        self._pass(inputs, y, one_by_one(FlatClip(1.0)), total, squares)
        return squares.sqrt()

    def _observe(self, inputs: tuple[Tensor, ...]) -> list[tuple[str, Tensor]]:
        """Run the forward pass of one batch. Return the names and first inputs of the sites in the
        order of their calls, and then the outputs of the module.
        """
        seen: list[tuple[str, Tensor]] = []

        def look(site: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if isinstance(site, GenericSite):
                site.observe(2, arguments, named)
            first = (*arguments, *named.values())[:1]
            if (
                isinstance(site, Site)
                and isinstance(first[0], Tensor)
                and site.rule.shares(first[0])
            ):
                self._shared.add(site.name or "the module")
            seen.extend(
                (site.name or "the module", value) for value in first if isinstance(value, Tensor)
            )

        with (
            torch.no_grad(),
            fork_rng(0, inputs[0].device),
            self._replace_forward(_observer([], look)),
        ):
            outputs = self._module(*inputs)
        leaves = torch.utils._pytree.tree_leaves(outputs)
        return seen + [("the output", value) for value in leaves if isinstance(value, Tensor)]


@contextmanager
def _replace_forward(
    sites: Sequence[Any],
    pools: Sequence[Any],
    restored: Restored | None,
    call: Callable[..., Any],
    with_pools: bool = True,
) -> Iterator[None]:
    """Inside the block, replace the forward pass of each site with `call(site, *arguments)` and, if
    `with_pools` is set, the forward pass of each pooling layer with `max_pool`.
    """
    replaced = {site.module: _bind(call, site) for site in sites}
    replaced |= {pool: partial(max_pool, pool) for pool in pools if with_pools}
    before = {module: vars(module).get("forward") for module in replaced}
    with restored_around(restored):
        try:
            for module, forward in replaced.items():
                module.forward = forward
            yield
        finally:
            for module, original in before.items():
                if original is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = original


def _bind(call: Callable[..., Any], site: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: call(site, *arguments, **named)


def _observer(
    sizes: list[int], look: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
) -> Callable[..., Any]:
    """Make a function that `_replace_forward` uses as the forward pass. It computes the usual
    output, calls `look`, and appends to `sizes` the number of values per example of each input and
    output.
    """

    def call(site: Any, *arguments: Any, **named: Any) -> Any:
        values = (*arguments, *named.values())
        if isinstance(site, Site):
            require_rows(type(site.rule), site.module, site.name, values[0])
        out = type(site.module).forward(site.module, *arguments, **named)
        look(site, arguments, named)
        sizes.extend(
            v[0].numel() for v in (*values, out) if isinstance(v, Tensor) and v.dim() and len(v)
        )
        if isinstance(site, Site):
            sizes.append(site.rule.numbers_to_keep(values[0], out))
        return out

    return call


def _require_pairs(inputs: tuple[Any, ...], y: Any) -> None:
    lengths = [values.shape[0] for values in (*inputs, y)]
    if len(set(lengths)) > 1:
        *first, last = map(str, lengths)
        raise ConfigError(
            f"a batch must have as many inputs as targets, got {', '.join(first)} and {last}"
        )


def _refuse_batch_norm(module: nn.Module) -> None:
    for name, child in module.named_modules():
        batch = isinstance(child, nn.modules.batchnorm._BatchNorm)
        running = getattr(child, "running_mean", None) is not None
        # Without running statistics, BatchNorm uses the statistics of the batch in every mode.
        if (running and child.training and not isinstance(child, Frozen)) or (
            batch and not running
        ):
            raise ConfigError(
                f"{name or 'the module'} ({type(child).__name__}) mixes the examples of a batch, "
                "so that none has a separate gradient: replace it with "
                "fedlgm.models.to_groupnorm(model)"
            )
