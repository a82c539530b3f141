"""Layer risk: how accurately an adversary detects members from a layer's output, measured only on
public data.

A shadow model with the target's architecture is trained on one part of a public data set. One
adversary per layer is trained on the layer's outputs for this part (members) and for the rest
(non-members). Its error rate ER_l measures the layer's leakage; 0.5 means that the adversary only
guesses. These adversaries see only outputs. A further adversary compares the norm of an example's
gradient in the layer with a threshold; this gradient is the quantity that training bounds and adds
noise to. `layer_risk` takes neither private data nor a model that was trained on private data.

Source: LM-DP-SGD paper, Section 4.1 and Algorithm 2; the paper does not specify the adversary's
network.

>>> x, y = torch.linspace(-1, 1, 60)[:, None].expand(60, 4), torch.arange(60) // 30
>>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
>>> quick = ShadowTraining(epochs=2, adversary_epochs=2)
>>> risks: list[LayerRisk] = layer_risk(model, x, y, keys=KeyRing.from_seed(1), training=quick)
>>> [risk.layer for risk in risks], max(risk.held_out_error for risk in risks) <= 0.5
(['0', '2'], True)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.mechanisms.lm_dp_sgd import bias_minimising_weights
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.queries import layer_directions
from fedlgm.training import tasks
from fedlgm.training.devices import fork_rng
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import FlatClip, Reweighted

FEATURES = 256
"""Largest number of output values per example that an adversary sees. Larger outputs are projected
at random to this number.
"""
_QUANTILES = torch.linspace(0.0, 1.0, 17)
"""Quantiles of an example's output values that the adversary also sees, since an outlier may lie at
any coordinate.
"""
LEAST = 40
"""Least number of public examples."""
# number of times that a shadow model's gradients are measured during its training, and number of
# examples on which they are measured
_LOOKS, _LOOKED_AT = 5, 256


@dataclass(frozen=True)
class LayerRisk:
    """Risk of one layer.

    Attributes:
        layer: name of the layer in the layer table.
        training_error: error rate of the adversary on its training set, as in the paper; this
            estimate is biased low.
        held_out_error: error rate of the adversary on members and non-members that it has not seen.
        strength: mean of ||g_l|| / ||g|| over the gradients of public examples during the shadow
            model's training (see `fedlgm.planning.queries.LayerStrength`).
        gradient_error: error rate of an adversary that only compares the norm of an example's
            gradient in the layer with a threshold, on examples that did not determine the
            threshold; members have smaller norms, because the model fits them.
    """

    layer: str
    training_error: float
    held_out_error: float
    strength: float = 1.0
    gradient_error: float = 0.5


@dataclass(frozen=True)
class ShadowTraining:
    """Settings for the training of the shadow model and the adversaries.

    Attributes:
        members: share of the public set on which the shadow model is trained.
        epochs: number of the shadow model's passes over its training examples.
        lr: learning rate of the shadow model (Adam).
        batch_size: number of examples per step of the shadow model and of the adversaries.
        adversary_epochs: number of an adversary's passes over its training examples (Adam, learning
            rate 0.001, one hidden layer of 64 units).

    Raises:
        ConfigError: a number is outside its range.
    """

    members: float = 0.5
    epochs: int = 30
    lr: float = 1e-3
    batch_size: int = 64
    adversary_epochs: int = 30

    def __post_init__(self) -> None:
        if (
            not 0 < self.members < 1
            or min(self.epochs, self.batch_size, self.adversary_epochs) < 1
            or self.lr <= 0
        ):
            raise ConfigError(f"shadow training out of range: {self}")

    def count_members(self, examples: int) -> int:
        """Return the number of examples on which the shadow model is trained. On either side there
        are enough examples for the adversaries.

        >>> ShadowTraining(members=0.01).count_members(60)
        10
        """
        return min(max(int(self.members * examples), LEAST // 4), examples - LEAST // 4)


def layer_risk(
    shadow: nn.Module,
    public_x: Tensor,
    public_y: Tensor,
    *,
    keys: KeyRing,
    training: ShadowTraining | None = None,
    task: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[LayerRisk]:
    """Measure the risk of every layer of an architecture, in the order of its layer table.

    A layer without an output (parameters that another module uses) has no adversary that sees
    outputs, and the two error rates of this adversary are 0.5.

    Args:
        shadow: a freshly initialised model of the target's architecture; it is trained in place on
            public data.
        public_x: public inputs [N, ...], N >= 40.
        public_y: public targets [N, ...].
        keys: source of splits, batches and the adversaries' initial weights.
        training: settings of the shadow model and the adversaries.
        task: a task, a task's name, or a function for the loss of each example; None stands for
            classification.
        progress: called with (done, total, description) after each pass of the shadow model, and
            then after each layer.

    Raises:
        ConfigError: there are too few examples, settings are out of range, or the module has no
            gradients per example.
    """
    settings, losses = training or ShadowTraining(), tasks.get(task)
    if len(public_y) < LEAST:
        raise ConfigError(f"layer risk needs at least {LEAST} public examples, got {len(public_y)}")
    order = torch.randperm(len(public_y), generator=keys.torch_generator(Purpose.PROBE, 0))
    count = settings.count_members(len(order))
    inside, outside = order[:count], order[count:]
    table = LayerTable.from_module(shadow)
    steps = settings.epochs + len(table)
    gradients = ExampleGradients(shadow, table, losses)
    looks: list[Tensor] = []

    def after(epoch: int) -> None:
        if epoch % -(-settings.epochs // _LOOKS) == 0 and epoch < settings.epochs:
            rows = inside[:_LOOKED_AT]
            norms = gradients.sum(public_x[rows], public_y[rows], FlatClip(1.0)).norms
            looks.append(layer_directions(norms).mean(dim=0))
        if progress is not None and epoch:
            progress(epoch, steps, "shadow model")

    stream = keys.torch_generator(Purpose.PROBE, 1)
    _fit(
        shadow,
        lambda rows: losses.losses(shadow(public_x[rows]), public_y[rows]),
        inside,
        settings,
        stream,
        after,
    )
    strengths = dict(zip(table.names, torch.stack(looks).mean(dim=0).tolist(), strict=True))
    errors = layer_errors(
        shadow,
        public_x,
        inside,
        outside,
        keys=keys,
        training=settings,
        progress=None
        if progress is None
        else lambda done, layer: progress(settings.epochs + done, steps, layer),
    )
    rates = {layer: (min(seen, 0.5), min(unseen, 0.5)) for layer, (seen, unseen) in errors.items()}
    equal = min(len(inside), len(outside))
    norms = [_norms(gradients, public_x, public_y, rows[:equal]) for rows in (inside, outside)]
    by_norm = gradient_errors(norms[0], norms[1], keys.torch_generator(Purpose.PROBE, 4))
    return [
        LayerRisk(layer, *rates.get(layer, (0.5, 0.5)), strengths[layer], norm_error)
        for layer, norm_error in zip(table.names, by_norm, strict=True)
    ]


def gradient_errors(members: Tensor, others: Tensor, stream: torch.Generator) -> list[float]:
    """Measure, for each layer, the error rate of an adversary that tells members from non-members
    by a threshold on gradient norms.

    The threshold is chosen on one half of the examples, and the error is measured on the other
    half.

    Args:
        members: norms of members' gradients in each layer, [n, L].
        others: norms of the gradients of as many non-members, [n, L].
        stream: random stream for the division into halves.

    Example:
        >>> members, others = torch.rand(100, 1), torch.rand(100, 1) + 0.9
        >>> gradient_errors(members, others, torch.Generator().manual_seed(0))[0] < 0.2
        True
    """
    seen, unseen = _halves(len(members), stream)
    errors = []
    for j in range(members.shape[1]):
        places = torch.cat([members[seen, j], others[seen, j]]).sort().values
        inside, outside = members[seen, j].sort().values, others[seen, j].sort().values
        below = torch.searchsorted(inside, places, right=True) - torch.searchsorted(
            outside, places, right=True
        )
        threshold = places[below.argmax()]
        wrong = (members[unseen, j] > threshold).double().mean() + (
            others[unseen, j] <= threshold
        ).double().mean()
        errors.append(min(float(wrong) / 2, 0.5))
    return errors


def _halves(count: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """Divide the numbers below `count` at random into two halves."""
    order = torch.randperm(count, generator=stream)
    return order[: count // 2], order[count // 2 :]


def _norms(gradients: ExampleGradients, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Compute the norm of each example's gradient in each layer, [n, L]."""
    return torch.cat(
        [gradients.sum(x[part], y[part], FlatClip(1.0)).norms for part in rows.split(_LOOKED_AT)]
    )


def layer_errors(
    module: nn.Module,
    x: Tensor,
    inside: Tensor,
    outside: Tensor,
    *,
    keys: KeyRing,
    training: ShadowTraining | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, tuple[float, float]]:
    """Train one adversary per layer of a trained model; return its error rates (training, held
    out), by layer.

    The adversary knows half of the members and half of the non-members; the held-out rate is its
    error on the other half. This is the second part of Algorithm 2. With a model that was trained
    on private data, and with its members, the function is an attack on this model; the result is
    then itself sensitive and must not be published.

    Args:
        module: the model.
        x: inputs [N, ...].
        inside: rows of the model's training examples.
        outside: rows of other examples.
        keys: source of the adversaries' splits, batches, projections and initial weights.
        training: settings of the adversaries.
        progress: called with (layers done, layer).

    Example:
        >>> x, inside, outside = torch.linspace(-1, 1, 60)[:, None], torch.arange(30), torch.arange(30, 60)
        >>> errors = layer_errors(nn.Sequential(nn.Linear(1, 8)), x, inside, outside, keys=KeyRing.from_seed(1))
        >>> errors["0"][1] < 0.3  # members lie apart from the others
        True
    """
    settings = training or ShadowTraining()
    equal = min(len(inside), len(outside))
    rows = torch.cat([inside[:equal], outside[:equal]])
    members = torch.cat([torch.ones(equal), torch.zeros(equal)])
    errors = {}
    for number, (layer, features) in enumerate(_representations(module, x, rows, keys).items()):
        errors[layer] = _errors(
            features, members, settings, keys.torch_generator(Purpose.PROBE, 2, number)
        )
        if progress is not None:
            progress(number + 1, layer)
    return errors


def public_bias_weights(
    module: nn.Module,
    layers: LayerTable,
    public_x: Tensor,
    public_y: Tensor,
    clip: float,
    task: Any = None,
) -> np.ndarray:
    """Compute layer weights that minimise the bias of reweighted clipping on public examples,
    float64 [L], at least 0.

    Let u_l be the mean of C_i g_il / ||g_il|| and grad_l the mean of g_il, both over the public
    examples. The weights minimise sum_l ||w_l u_l - grad_l||^2 subject to sum_l w_l^2 = 1; negative
    weights are then set to 0. If these weights are passed as `strengths` of "lm-dp-sgd", without
    error rates, they replace the paper's weights for convergence, which are computed from private
    data.

    Args:
        module: a model of the architecture, whose weights do not depend on private data.
        layers: the model's layers.
        public_x: public inputs [n, ...].
        public_y: public targets [n, ...].
        clip: clipping bound C.
        task: see `layer_risk`.

    Source: LM-DP-SGD paper, Appendix D.2, which computes such weights from the private batch.

    Example:
        >>> x, y = torch.linspace(-1, 1, 20)[:, None], torch.arange(20) // 10
        >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> weights = public_bias_weights(model, LayerTable.from_module(model), x, y, clip=1.0)
        >>> weights.shape, bool((weights >= 0).all())
        ((2,), True)
    """
    gradients, count = ExampleGradients(module, layers, tasks.get(task)), len(layers)
    alike = Reweighted(clip, (count**-0.5,) * count)
    means = [
        gradients.sum(public_x, public_y, scaling).total.double() / len(public_y)
        for scaling in (alike, FlatClip(float("inf")))
    ]
    pairs = list(zip(layers.split(means[0] * count**0.5), layers.split(means[1]), strict=True))
    squares, products = [float(u @ u) for u, _ in pairs], [float(u @ g) for u, g in pairs]
    return np.maximum(bias_minimising_weights(squares, products), 0.0)


def _representations(
    module: nn.Module, x: Tensor, rows: Tensor, keys: KeyRing
) -> dict[str, Tensor]:
    """Compute the standardised outputs of every layer with trained parameters, [n, features].

    If a layer is called several times, the outputs of all calls are concatenated.
    """
    table = LayerTable.from_module(module)
    features: dict[str, list[Tensor]] = {name: [] for name in table.names}
    modules = dict(module.named_modules())
    projections: dict[str, Tensor] = {}
    calls: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda _, __, output: calls.setdefault(name, []).append(output.detach().flatten(1))

    def summarise(name: str, flat: Tensor) -> Tensor:
        shape = torch.quantile(flat, _QUANTILES.to(flat), dim=1).T
        if flat.shape[1] > FEATURES:
            if name not in projections:
                stream = keys.torch_generator(Purpose.PROBE, 3, table.names.index(name))
                projections[name] = (
                    torch.randn(flat.shape[1], FEATURES, generator=stream) / flat.shape[1] ** 0.5
                )
            flat = flat @ projections[name]
        return torch.cat([flat, shape], dim=1)

    handles = [
        modules[name].register_forward_hook(keep(name)) for name in table.names if name in modules
    ]
    try:
        with torch.no_grad():
            for part in rows.split(256):
                calls.clear()
                module.eval()(x[part])
                for name, outputs in calls.items():
                    features[name].append(summarise(name, torch.cat(outputs, dim=1)))
    finally:
        for handle in handles:
            handle.remove()
    stacked = {name: torch.cat(parts) for name, parts in features.items() if parts}
    return {
        name: (value - value.mean(0)) / value.std(0).clamp(min=1e-6)
        for name, value in stacked.items()
    }


def _errors(
    features: Tensor, members: Tensor, settings: ShadowTraining, stream: torch.Generator
) -> tuple[float, float]:
    """Train an adversary on half of the examples, and measure its error rates on this half and on
    the other half.
    """
    seen, unseen = _halves(len(members), stream)
    with fork_rng(int(torch.randint(2**62, (), generator=stream))):
        adversary = nn.Sequential(
            nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0)
        )
    entropy = nn.functional.binary_cross_entropy_with_logits
    training = ShadowTraining(epochs=settings.adversary_epochs, batch_size=settings.batch_size)
    _fit(
        adversary,
        lambda rows: entropy(adversary(features[rows]), members[rows], reduction="none"),
        seen,
        training,
        stream,
    )
    with torch.no_grad():
        wrong = (adversary(features) > 0).float() != members
    return float(wrong[seen].float().mean()), float(wrong[unseen].float().mean())


def _fit(
    module: nn.Module,
    losses: Callable[[Tensor], Tensor],
    rows: Tensor,
    settings: ShadowTraining,
    stream: torch.Generator,
    after: Callable[[int], None] = lambda epoch: None,
) -> None:
    """Minimise the mean loss of some examples with Adam; `after` is called with the number of
    finished passes, first with 0.
    """
    optimizer = torch.optim.Adam(module.train().parameters(), lr=settings.lr)
    after(0)
    for epoch in range(1, settings.epochs + 1):
        for batch in rows[torch.randperm(len(rows), generator=stream)].split(settings.batch_size):
            optimizer.zero_grad()
            losses(batch).mean().backward()
            optimizer.step()
        after(epoch)
