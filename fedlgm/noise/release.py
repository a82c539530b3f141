"""Adds the plan's noise to bounded sums. A run's noise is added nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import bound_on
from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.draws import NoiseBackend
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.run_noise import INDEPENDENT, RunNoise, check_cpu, noise_source
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.views import NoiseSource
from fedlgm.privacy.ledger import SERVER

__all__ = [
    "SERVER",
    "Noising",
    "ReleaseObserver",
    "fingerprint",
    "local_release",
    "local_releases",
    "release",
]

_PRECISE = (torch.float32, torch.float64)


class ReleaseObserver(Protocol):
    """An observer of a simulation's sums before and after noise. It is never part of a deployment.

    Example:
        >>> class Noise:
        ...     def insert(self, round, plan, total):
        ...         self.exact = total.clone()
        ...
        ...     def observe(self, round, plan, noisy):
        ...         print(round, float((noisy - self.exact).std()))
        >>> observer: ReleaseObserver = Noise()
    """

    def insert(self, round: int, plan: ReleasePlan, total: Tensor) -> None:
        """Receive the bounded sum [plan.size] before noise is added; the observer may add to it in
        place.
        """

    def observe(self, round: int, plan: ReleasePlan, noisy: Tensor) -> None:
        """Receive the noisy sum [plan.size] before it is used."""


@dataclass(frozen=True, eq=False)
class Noising:
    """The noise of one release. The noise has a name for the ledger before it is added to the sum.

    A secret ring is never used directly. The noise is drawn from a key that follows from the ring,
    the sum, the plan and, if noise is correlated over rounds, the run's earlier noise:

    * A round that is repeated with other contributions gets different noise. With the same noise,
      the difference of the two releases would be the exact difference of the contributions.
    * The same sum at two noise scales gets different noise. With the same draws, the two releases
      would reveal both the sum and the noise.
    * The same sum under the same plan gets the same noise, so a repeated release reveals nothing
      new.

    The ring of a public seed is used directly, because anyone who knows the seed can draw its noise
    anyway.

    Attributes:
        total: the sum, [plan.size]; it is unchanged until `add_` is called.
        plan: the round's plan.
        ring: key ring of this noise, which `of` derives.
        round: round number, from 1.
        party: see `release`.
        backend: see `release`.
        source: source of the noise.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> facts, layers = RunFacts(1.0, Sampling("poisson", 10, 0.5)), LayerTable.from_sizes({"weight": 2})
        >>> plan = ReleasePlan(layers, [1.0], [1.0], facts, Guarantee("proven", "an example"))
        >>> ring, sums = KeyRing.from_seed(None), (torch.ones(2).double(), torch.zeros(2).double())
        >>> one, other = (Noising.of(total, plan, ring, round=1) for total in sums)
        >>> one.name == other.name
        False
    """

    total: Tensor
    plan: ReleasePlan
    ring: KeyRing = field(repr=False)
    round: int
    party: int = SERVER
    backend: NoiseBackend = "cpu"
    source: NoiseSource[ReleasePlan] = INDEPENDENT

    @classmethod
    def of(
        cls,
        total: Tensor,
        plan: ReleasePlan,
        keys: KeyRing,
        round: int,
        party: int = SERVER,
        backend: NoiseBackend = "cpu",
        run_noise: RunNoise | None = None,
    ) -> Noising:
        """The noise for this sum. The arguments are those of `release`.

        Raises:
            ConfigError: the sum is neither float32 nor float64.
            PrivacyError: `run_noise` is missing although noise is correlated, or the plan's noise
                is added in shares.
            RunError: the earlier noise of the run cannot be drawn again.
        """
        if not plan.facts.noised_by.alone:
            raise PrivacyError(
                "the plan's noise is added in shares, each by a node: use local_release"
            )
        if total.dtype not in _PRECISE:
            raise ConfigError(
                f"a sum must be float32 or float64, got {total.dtype}, which cannot hold its noise"
            )
        source = noise_source(plan, run_noise)
        keys = source.following(keys, round)
        return cls(total, plan, _bind_keys(keys, total, plan), round, party, backend, source)

    @property
    def name(self) -> str:
        """Public name of this noise, for the ledger."""
        return fingerprint(self.ring, self.round, self.party, self.backend)

    def add_(self) -> Tensor:
        """Add the noise to the sum, in place. Charge the ledger with `plan.event` BEFORE calling
        this method. The errors are those of `release`.
        """
        return self.source.add_(
            self.total, self.plan, self.ring, self.round, self.party, self.backend
        )


def release(
    total: Tensor,
    plan: ReleasePlan,
    keys: KeyRing,
    round: int,
    party: int = SERVER,
    backend: NoiseBackend = "cpu",
    run_noise: RunNoise | None = None,
) -> Tensor:
    """Add the plan's noise to a bounded sum, in place. Charge the ledger with `plan.event` BEFORE
    calling this function.

    The result is differentially private under the relation `plan.facts.relation`, at the cost
    `plan.event`.

    Args:
        total: sum of bounded contributions (central trust) or one client's contribution (local
            trust), [plan.size] float64 (or float32, if the sum is exact in float32). `BoundedSum`
            makes such a sum.
        plan: the round's plan.
        keys: key ring of the party that adds the noise. If the ring is secret, the noise also
            depends on the sum and the plan (see `Noising`), so two different sums never share
            noise.
        round: round number, from 1.
        party: `SERVER`, or the client's number under local trust.
        backend: the generator: "cpu" (Mersenne Twister streams; `total` must be on the CPU), or the
            kernels' Philox in "torch" or "triton" on the device of `total`. The distribution is the
            same, but the bits differ.
        run_noise: the noise of the run so far, if the plan's noise is correlated over rounds.

    Returns:
        `total`, which may now be published under `plan.guarantee`.

    Raises:
        ConfigError: the backend does not run on the device of `total`, or `total` has another type.
        PrivacyError: a noise scale is outside [2^-100, 2^100], or noise is correlated over rounds
            and `run_noise` is missing or does not fit.
        RunError: the earlier noise of the run cannot be drawn again.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> facts, layers = RunFacts(2.0, Sampling("poisson", 10, 0.5)), LayerTable.from_sizes({"weight": 10_000})
        >>> plan = ReleasePlan(layers, [1.0], [2.0], facts, Guarantee("proven", "an example"))
        >>> noisy = release(torch.zeros(plan.size).double(), plan, KeyRing.from_seed(1), round=1)
        >>> round(float(noisy.std()), 1)
        2.0
    """
    return Noising.of(total, plan, keys, round, party, backend, run_noise).add_()


def local_release(
    updates: Updates | None,
    plan: ReleasePlan,
    keys: KeyRing,
    round: int,
    client: int,
    backend: NoiseBackend = "cpu",
    device: torch.device | str = "cpu",
) -> tuple[Tensor, str]:
    """One client's release under local trust: its bounded update plus the client's own noise.

    The noise depends on the bounded contribution. If the client's data have changed, the same
    request gets new noise, a new name and a new charge. Otherwise, it gets the same bits as before.

    Args:
        updates: the client's update, [1, D]; None for a client without data, which releases only
            noise.
        plan: bounds and noise for this client.
        keys: the client's secret ring, derived from everything that determines the release except
            the data.
        round: round number, from 1.
        client: the client's number.
        backend: see `release`.
        device: device on which updates are bounded.

    Returns:
        The client's noisy contribution [plan.size], and the name of its noise for the client's
        record of releases.

    Raises:
        ConfigError: the backend does not run on the device of the sum.
        PrivacyError: the kernels cannot represent a noise scale, or the plan cannot bound the
            updates.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 10, 0.5), "replace-one", "local")
        >>> plan = ReleasePlan(
        ...     LayerTable.from_sizes({"weight": 2}), [1.0], [2.0], facts, Guarantee("proven", "an example")
        ... )
        >>> update, keys = torch.tensor([[1.0, 0.0]]), KeyRing.from_seed(1)
        >>> own, name = local_release(update, plan, keys, 1, client=0)
        >>> name == local_release(update, plan, keys, 1, 0)[1], name == local_release(-update, plan, keys, 1, 0)[1]
        (True, False)
    """
    totals, names = local_releases(updates, plan, keys, round, [client], backend, device)
    return totals[0], names[0]


def local_releases(
    updates: Updates | None,
    plan: ReleasePlan,
    keys: KeyRing,
    round: int,
    clients: Sequence[int],
    backend: NoiseBackend = "cpu",
    device: torch.device | str = "cpu",
) -> tuple[Tensor, list[str]]:
    """Releases of several clients, each as `local_release` makes it.

    On the CPU, small releases take half as long if each step is done for all clients at once.

    Args:
        updates: one row for each client, [b, D]; None for clients without data, which release only
            noise.
        plan: see `local_release`.
        keys: the ring of all these clients; a client's noise also depends on the client's number
            and contribution.
        round: see `local_release`.
        clients: the clients' numbers, [b].
        backend: see `release`.
        device: see `local_release`.

    Returns:
        The noisy contributions [b, plan.size], and the names of their noise.
    """
    source, place = noise_source(plan, None), torch.device(device)
    totals = bound_on(place, updates, plan, len(clients), None if backend == "cpu" else backend)
    if backend == "cpu":
        check_cpu(totals)
    rings = [keys.derive(total.cpu().numpy().view(np.uint8).data) for total in totals.unbind()]
    if source is INDEPENDENT and backend == "cpu":
        INDEPENDENT.add_rows_(totals, plan, rings, round, clients)
    else:
        for total, ring, client in zip(totals.unbind(), rings, clients, strict=True):
            source.add_(total, plan, ring, round, client, backend)
    return totals, [
        fingerprint(ring, round, client, backend)
        for ring, client in zip(rings, clients, strict=True)
    ]


def fingerprint(
    keys: KeyRing, round: int, party: int = SERVER, backend: NoiseBackend = "cpu"
) -> str:
    """Public name of a release's noise key, for the ledger; equal names mean equal noise. The
    arguments are those of `release`.

    Example:
        >>> keys = KeyRing.from_seed(1)
        >>> fingerprint(keys, 1) == fingerprint(keys, 1), fingerprint(keys, 1) == fingerprint(keys, 2)
        (True, False)
    """
    words = keys.words(8, Purpose.NOISE, round, party + 1).tobytes()
    return hashlib.sha256(words if backend == "cpu" else words + backend.encode()).hexdigest()[:32]


def _bind_keys(keys: KeyRing, exact: Tensor, plan: ReleasePlan) -> KeyRing:
    """Ring of the noise for a vector [n] that is about to be released under a plan; see
    `Noising`.
    """
    if not keys.secret:
        return keys
    values = np.ascontiguousarray(exact.detach().cpu().numpy()).view(np.uint8).data
    # A plan's text does not state where one layer ends and the next begins, but each layer has its
    # own stream of noise.
    return keys.derive(values, plan.to_json().encode(), plan.layers.sizes.tobytes())
