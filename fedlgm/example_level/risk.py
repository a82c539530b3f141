"""Layer risk: how well an adversary tells members by a layer's output, measured on public data alone.

A shadow model of the target's architecture is trained on one part of a public data set. Its layers' outputs for that
part (members) and for the rest (non-members) train one adversary per layer, whose error rate ER_l says how much the
layer gives away: 0.5 is a coin toss. Nothing here takes private data, or a model that was trained on it.

Source: LM-DP-SGD paper, Section 4.1 and Algorithm 2; the adversary's layers are not given there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm import tasks
from fedlgm.errors import ConfigError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.layers import LayerTable

FEATURES = 256
"""Numbers per example that an adversary sees: larger outputs are projected at random."""


@dataclass(frozen=True)
class LayerRisk:
    """Risk of one layer.

    Attributes:
        layer: its name in the layer table.
        training_error: error rate of the adversary on its own training set, as the paper measures it: biased low.
        held_out_error: error rate on members and non-members that the adversary has not seen.
    """

    layer: str
    training_error: float
    held_out_error: float


@dataclass(frozen=True)
class ShadowTraining:
    """How the shadow model and the adversaries are trained.

    Attributes:
        members: share of the public set that the shadow model is trained on.
        epochs: passes of the shadow model.
        lr: its learning rate (Adam).
        batch_size: examples per step of either.
        adversary_epochs: passes of the adversaries (Adam, learning rate 0.001, one hidden layer of 64).
    """

    members: float = 0.5
    epochs: int = 30
    lr: float = 1e-3
    batch_size: int = 64
    adversary_epochs: int = 30

    def __post_init__(self) -> None:
        if not 0 < self.members < 1 or min(self.epochs, self.batch_size, self.adversary_epochs) < 1 or self.lr <= 0:
            raise ConfigError(f"shadow training out of range: {self}")


def layer_risk(
    shadow: nn.Module,
    public_x: Tensor,
    public_y: Tensor,
    *,
    keys: KeyRing,
    training: ShadowTraining | None = None,
    task: Any = None,
    progress: Callable[[str], None] | None = None,
) -> list[LayerRisk]:
    """Error rates of the layers of an architecture, in the order of its layer table.

    Args:
        shadow: a freshly initialised model of the target's architecture; it is trained in place on public data.
        public_x: public inputs [N, ...], N >= 40.
        public_y: public targets [N, ...].
        keys: splits and batches; initial weights of the adversaries.
        training: how shadow model and adversaries are trained.
        task: a task, its name, or losses per example; None is classification.
        progress: called with what has been finished.

    Raises:
        ConfigError: too few examples, or settings out of range.
    """
    settings, losses = training or ShadowTraining(), tasks.get(task)
    if len(public_y) < 40:
        raise ConfigError(f"layer risk needs at least 40 public examples, got {len(public_y)}")
    order = torch.randperm(len(public_y), generator=keys.torch_generator(Purpose.PROBE, 0))
    count = int(settings.members * len(order))
    inside, outside = order[:count], order[count:]
    stream = keys.torch_generator(Purpose.PROBE, 1)
    _fit(shadow, lambda rows: losses.losses(shadow(public_x[rows]), public_y[rows]), inside, settings, stream)
    if progress is not None:
        progress("shadow model")
    equal = min(len(inside), len(outside))
    rows = torch.cat([inside[:equal], outside[:equal]])
    members = torch.cat([torch.ones(equal), torch.zeros(equal)])
    risks = []
    for number, (layer, features) in enumerate(_representations(shadow, public_x, rows, keys).items()):
        stream = keys.torch_generator(Purpose.PROBE, 2, number)
        risks.append(LayerRisk(layer, *_errors(features, members, settings, stream)))
        if progress is not None:
            progress(layer)
    return risks


def _representations(module: nn.Module, x: Tensor, rows: Tensor, keys: KeyRing) -> dict[str, Tensor]:
    """Outputs of every layer that has trained parameters, standardised, [n, features]."""
    table = LayerTable.from_module(module)
    found: dict[str, list[Tensor]] = {name: [] for name in table.names}
    modules = dict(module.named_modules())
    projections: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            flat = output.detach().flatten(1)
            if flat.shape[1] > FEATURES:
                if name not in projections:
                    stream = keys.torch_generator(Purpose.PROBE, 3, table.names.index(name))
                    projections[name] = torch.randn(flat.shape[1], FEATURES, generator=stream) / flat.shape[1] ** 0.5
                flat = flat @ projections[name]
            found[name].append(flat)

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in table.names if name in modules]
    try:
        with torch.no_grad():
            for part in rows.split(256):
                module.eval()(x[part])
    finally:
        for handle in handles:
            handle.remove()
    stacked = {name: torch.cat(parts) for name, parts in found.items() if parts}
    return {name: (value - value.mean(0)) / value.std(0).clamp(min=1e-6) for name, value in stacked.items()}


def _errors(
    features: Tensor, members: Tensor, settings: ShadowTraining, stream: torch.Generator
) -> tuple[float, float]:
    """Error rates of an adversary on the examples it is trained on, and on as many others."""
    order = torch.randperm(len(members), generator=stream)
    seen, unseen = order[: len(order) // 2], order[len(order) // 2 :]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=stream)))
        adversary = nn.Sequential(nn.Linear(features.shape[1], 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    entropy = nn.functional.binary_cross_entropy_with_logits
    own = ShadowTraining(epochs=settings.adversary_epochs, batch_size=settings.batch_size)
    _fit(adversary, lambda rows: entropy(adversary(features[rows]), members[rows], reduction="none"), seen, own, stream)
    with torch.no_grad():
        wrong = (adversary(features) > 0).float() != members
    return tuple(min(float(wrong[rows].float().mean()), 0.5) for rows in (seen, unseen))  # type: ignore[return-value]


def _fit(
    module: nn.Module,
    losses: Callable[[Tensor], Tensor],
    rows: Tensor,
    settings: ShadowTraining,
    stream: torch.Generator,
) -> None:
    """Minimise the mean loss of some examples with Adam."""
    optimizer = torch.optim.Adam(module.train().parameters(), lr=settings.lr)
    for _ in range(settings.epochs):
        for batch in rows[torch.randperm(len(rows), generator=stream)].split(settings.batch_size):
            optimizer.zero_grad()
            losses(batch).mean().backward()
            optimizer.step()
