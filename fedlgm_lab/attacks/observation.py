"""What an attacker sees of one client's update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import bound_update
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits.whitening import Whitening


@dataclass(frozen=True, eq=False)
class Observation:
    """One client's update as the attacker sees it.

    Attributes:
        layers: the model's layers.
        update: observed update, float32 [D]; zero in layers that the attacker does not see.
        sigma: standard deviation of the noise in each layer, which is public, [K]; 0 for a layer
            without noise, infinite for a layer that the attacker does not see.

    Raises:
        ConfigError: `update` or `sigma` does not fit the layers.
    """

    layers: LayerTable
    update: Tensor
    sigma: np.ndarray

    def __post_init__(self) -> None:
        if self.update.shape != (self.layers.size,) or self.sigma.shape != (len(self.layers),):
            raise ConfigError(
                f"an observation of {len(self.layers)} layers and {self.layers.size} parameters "
                f"cannot hold {tuple(self.update.shape)} values and {self.sigma.shape} noise scales"
            )

    @classmethod
    def unprotected(cls, layers: LayerTable, update: Tensor) -> Observation:
        """Observe the raw update [D], as plain federated averaging sends it."""
        return cls(layers, update.detach().float().clone(), np.zeros(len(layers)))

    @classmethod
    def released(
        cls, update: Tensor, plan: ReleasePlan, keys: KeyRing, round: int = 1
    ) -> Observation:
        """Observe the update [D] after the library has bounded it and added noise according to
        `plan`.

        Under local trust the observation is the client's message. Under central trust it is the
        released sum minus the contributions of all other clients, which the adversary in the
        definition of differential privacy knows. If noise is correlated over rounds, this adversary
        also knows the noise of earlier rounds and sees this round's noise again in later rounds.
        The releases of all rounds together leave noise sigma / ||C[:, t]|| on the update. The
        release serves measurement only, so no ledger is charged.
        """
        bounded, sigma = bound_update(update, plan), plan.round_sigma
        if plan.facts.noise is None:
            noisy = release(bounded, plan, keys, round).float()
        else:
            noisy = _by_all_rounds(bounded, plan, keys, round).float()
            sigma = plan.sigma / plan.facts.noise.column_norms()[round - 1]
        factor = np.sqrt(2.0) if plan.family == "laplace" else 1.0
        return cls(plan.layers, plan.expand(noisy), np.where(plan.released, sigma * factor, np.inf))

    @property
    def visible(self) -> np.ndarray:
        """Whether the attacker sees a layer at all, bool [K]."""
        return np.isfinite(self.sigma)

    @property
    def signal_share(self) -> np.ndarray:
        """Estimated share of the signal in each layer's squared norm, in [0, 1], [K]; 0 for a layer
        that the attacker does not see.

        The share is max(0, 1 - d_j sigma_j^2 / ||u_j||^2), which the attacker computes from the
        observation and the public noise scales.
        """
        energy = self.layers.squared_norms(self.update).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            share = 1 - self.layers.sizes * np.where(self.visible, self.sigma, 0.0) ** 2 / energy
        return np.where(self.visible & (energy > 0), np.clip(share, 0.0, 1.0), 0.0)

    def only(self, names: Sequence[str]) -> Observation:
        """Restrict the observation to the layers `names`.

        Raises:
            ConfigError: no layer has one of these names.
        """
        unknown = sorted(set(names) - set(self.layers.names))
        if unknown:
            raise ConfigError(
                f"no layer {unknown[0]!r}; the model has {', '.join(self.layers.names)}"
            )
        keep = np.isin(self.layers.names, list(names))
        parts = [
            part if visible else torch.zeros_like(part)
            for part, visible in zip(self.layers.split(self.update), keep, strict=True)
        ]
        return Observation(self.layers, torch.cat(parts), np.where(keep, self.sigma, np.inf))


def _by_all_rounds(contribution: Tensor, plan: ReleasePlan, keys: KeyRing, round: int) -> Tensor:
    """Estimate a contribution, float64 [plan.size], from the releases of all rounds that the
    contribution moves.

    If y are the releases and t is the round, the noise of C y is independent, and the contribution
    moves row i of C y by C[i, t] times itself. The result is the least-squares estimate.
    """
    noise = plan.facts.noise
    assert noise is not None
    column = noise.coefficients[: noise.rounds - round + 1]
    run_noise, whitening, projection = RunNoise(), Whitening(noise, plan.size), np.zeros(plan.size)
    for number in range(1, round + len(column)):
        total = contribution.clone() if number == round else torch.zeros_like(contribution)
        seen = release(total, replace(plan, position=number - 1), keys, number, run_noise=run_noise)
        row = whitening.next(number, seen.numpy())
        if number >= round:
            projection += column[number - round] * row
    return torch.from_numpy(projection / float(column @ column))
