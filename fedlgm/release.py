"""Adds the plan's noise to bounded sums; nothing else in the library draws noise for a release."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import BoundedSum, kernels, part_offsets, sum_on
from fedlgm.contributions import Updates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.noise import NoiseBackend, add_noise_, add_scaled_, unit_noise
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER
from fedlgm.run_noise import Draw, RunNoise

__all__ = ["SERVER", "Noising", "add_downlink_", "fingerprint", "local_release", "release"]


@dataclass(frozen=True, eq=False)
class Noising:
    """The noise of one release, bound to the sum that it protects: named before the charge, added after it.

    A secret ring is never used as it is. Noise follows from the sum: if a round is made again with other contributions,
    its noise differs, and the difference of the two releases is not the difference of the contributions. It follows
    from the plan, since the same sum with the same draws at two scales would give both away, and from the run's earlier
    noise where noise is correlated over rounds. The same sum by the same plan gets the same noise, so a repeated
    release is one release. A public seed's ring stays as it is: anyone who knows the seed can draw its noise anyway.

    Attributes:
        total: the sum, [plan.size]; unchanged until `add_`.
        plan: the round's plan.
        ring: ring of this noise, from `of`.
        round: round number, from 1.
        party: see `release`.
        backend: see `release`.
        run_noise: see `release`.

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
    run_noise: RunNoise | None = None

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
        """The noise of this sum; arguments as for `release`.

        Raises:
            PrivacyError: correlated noise whose past is not given.
            RunError: the past of correlated noise is not known.
        """
        if plan.facts.noise is not None:
            if run_noise is None:
                raise PrivacyError(
                    "this round's noise follows from that of earlier rounds: pass the run's noise (run_noise)"
                )
            keys = run_noise.following(keys, round)
        return cls(total, plan, _bound(keys, total, plan), round, party, backend, run_noise)

    @property
    def name(self) -> str:
        """Public name of this noise, for the ledger."""
        return fingerprint(self.ring, self.round, self.party, self.backend)

    def add_(self) -> Tensor:
        """Add the noise to the sum, in place. Charge the ledger with `plan.event` BEFORE; errors as for `release`."""
        plan, total = self.plan, self.total
        if plan.facts.noise is not None:
            return self._add_correlated_()
        if self.backend == "cpu":
            _check_cpu(total)
            layers = [int(j) for j in plan.indices] + [len(plan.layers) + i for i in range(len(plan.queries))]
            streams = [self.ring.torch_generator(Purpose.NOISE, self.round, self.party + 1, layer) for layer in layers]
            return add_noise_(total, [(part.size, part.sigma) for part in plan.parts], streams, plan.family)
        if plan.size == 0:
            return total
        stream = kernels.SERVER_STREAM if self.party == SERVER else _stream(self.party)
        scale = _scale([part.sigma for part in plan.parts]).to(total.device)
        key = kernels.noise_key(self.ring, self.round)
        return kernels.add_noise_(total, part_offsets(plan), scale, plan.family, key, stream, backend=self.backend)

    def _add_correlated_(self) -> Tensor:
        """Add sigma_j w_t to every part, w_t being the round's row of C^-1 z.

        z is drawn in every round for all layers and queries, released or not: a layer's noise goes on while it pauses.
        """
        plan, total, round, run_noise = self.plan, self.total, self.round, self.run_noise
        noise = plan.facts.noise
        if noise is None or run_noise is None:
            raise PrivacyError("correlated noise is made by Noising.of")
        if plan.position != round - 1:
            raise PrivacyError(f"this plan is not that of round {round}: make plans by Method.plan")
        if plan.size == 0:
            run_noise.skip(round, self.ring)
            return total
        if self.backend == "cpu":
            _check_cpu(total)
        sizes = [*(int(size) for size in plan.layers.sizes), *(noisy.query.size for noisy in plan.queries)]
        ends = np.cumsum([0, *sizes])

        def drawn(ring: KeyRing, number: int) -> Tensor:
            if self.backend == "cpu":
                return unit_noise(
                    sizes, [ring.torch_generator(Purpose.NOISE, number, SERVER + 1, j) for j in range(len(sizes))]
                )
            values = torch.zeros(sum(sizes), dtype=kernels.widest(total.device), device=total.device)
            scale, key = torch.ones(len(sizes), device=total.device), kernels.noise_key(ring, number)
            offsets, stream = torch.from_numpy(ends), kernels.SERVER_STREAM
            kernels.add_noise_(values, offsets, scale, "gaussian", key, stream, grid=False, backend=self.backend)
            return values.to(where)

        where = torch.device("cpu") if total.device.type == "mps" else total.device  # Metal has no double precision
        w = run_noise.next(noise, sum(sizes), round, self.ring, Draw(drawn, where))
        places = [int(j) for j in plan.indices] + [len(plan.layers) + i for i in range(len(plan.queries))]
        pieces = total.split([part.size for part in plan.parts])
        for place, part, piece in zip(places, plan.parts, pieces, strict=True):
            add_scaled_(piece, w[ends[place] : ends[place + 1]], part.sigma)
        return total


def release(
    total: Tensor,
    plan: ReleasePlan,
    keys: KeyRing,
    round: int,
    party: int = SERVER,
    backend: NoiseBackend = "cpu",
    run_noise: RunNoise | None = None,
) -> Tensor:
    """Add the plan's noise to a bounded sum, in place. Charge the ledger with `plan.event` BEFORE calling this.

    Args:
        total: sum of bounded contributions (central trust) or one client's own (local trust), [plan.size] float64 (or
            float32, if the sum is exact in it).
        plan: the round's plan.
        keys: key ring of the noising party. The noise of a secret ring follows from the sum and the plan, too (see
            `Noising`), so two different sums never share noise.
        round: round number, from 1.
        party: `SERVER`, or the client's number under local trust.
        backend: who draws: "cpu" (Mersenne Twister streams; `total` must be on the CPU), or the kernels' Philox in
            "torch" or "triton" on the device of `total`. The law is the same, the bits are not.
        run_noise: the noise of the run so far, where the plan's noise is correlated over rounds.

    Returns:
        `total`, now safe to publish to the degree that `plan.guarantee` says.

    Raises:
        ConfigError: a backend that does not run on the device of `total`.
        PrivacyError: a noise scale that the kernels cannot represent, or correlated noise whose past is not given or
            does not fit.
        RunError: the past of correlated noise cannot be drawn again.

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
) -> tuple[BoundedSum, str]:
    """One client's own release under local trust: its update, bounded, with the client's own noise.

    The noise depends on the bounded contribution: the same request after the client's data changed is answered with
    other noise under another name, and has to be paid for; with unchanged data it is answered with the same bits.

    Args:
        updates: [1, D]; None for a client without data, which releases its noise alone.
        plan: by which this client bounds and noises.
        keys: the client's secret ring, derived from all that the release depends on besides its data.
        round: round number, from 1.
        client: the client's number.
        backend: see `release`.
        device: where updates are bounded.

    Returns:
        The noisy sum of one, and the name of its noise for the client's record of releases.

    Raises:
        ConfigError: a backend that does not run where the sum lies.
        PrivacyError: a noise scale that the kernels cannot represent, or updates that the plan cannot bound.

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
    own = sum_on(plan, torch.device(device), None if backend == "cpu" else backend)
    if backend == "cpu":
        _check_cpu(own.total)
    if updates is None:
        own.skip(1)
    else:
        own.add(updates)
    bound_to_data = keys.derive(own.total.cpu().numpy().view(np.uint8).data)
    noising = Noising(own.total, plan, bound_to_data, round, client, backend)
    noising.add_()
    return own, noising.name


def add_downlink_(mean: Tensor, plan: ReleasePlan, keys: KeyRing, round: int, backend: NoiseBackend = "cpu") -> Tensor:
    """Add the plan's broadcast noise to every coordinate of a released mean [plan.size], in place; nothing if it is 0.

    For local trust only, where the server's own streams add no other noise. Arguments and errors as for `release`.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 10, 0.5), "replace-one", "local")
        >>> layers, proven = LayerTable.from_sizes({"weight": 10_000}), Guarantee("proven", "an example")
        >>> plan = ReleasePlan(layers, [1.0], [2.0], facts, proven, downlink=0.5)
        >>> round(float(add_downlink_(torch.zeros(plan.size), plan, KeyRing.from_seed(1), round=1).std()), 1)
        0.5
    """
    if plan.downlink == 0:
        return mean
    keys = _bound(keys, mean, plan)
    if backend == "cpu":
        _check_cpu(mean)
        return add_noise_(
            mean, [(mean.numel(), plan.downlink)], [keys.torch_generator(Purpose.NOISE, round, SERVER + 1)]
        )
    offsets, scale = torch.tensor([0, mean.numel()]), _scale([plan.downlink]).to(mean.device)
    key = kernels.noise_key(keys, round)
    return kernels.add_noise_(mean, offsets, scale, "gaussian", key, kernels.DOWNLINK_STREAM, backend=backend)


def fingerprint(keys: KeyRing, round: int, party: int = SERVER, backend: NoiseBackend = "cpu") -> str:
    """Public name of a release's noise key, for the ledger: equal names mean equal noise; arguments as for `release`.

    Example:
        >>> keys = KeyRing.from_seed(1)
        >>> fingerprint(keys, 1) == fingerprint(keys, 1), fingerprint(keys, 1) == fingerprint(keys, 2)
        (True, False)
    """
    words = keys.words(8, Purpose.NOISE, round, party + 1).tobytes()
    return hashlib.sha256(words if backend == "cpu" else words + backend.encode()).hexdigest()[:32]


def _bound(keys: KeyRing, exact: Tensor, plan: ReleasePlan) -> KeyRing:
    """Ring of the noise for a vector [n] that a plan is about to release, see `Noising`."""
    if not keys.secret:
        return keys
    return keys.derive(np.ascontiguousarray(exact.detach().cpu().numpy()).view(np.uint8).data, plan.to_json().encode())


def _check_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"noise backend 'cpu' draws for tensors on the CPU only, these are on {tensor.device}: use 'torch' or "
            "'triton'"
        )


def _stream(client: int) -> int:
    if not 0 <= client < kernels.DOWNLINK_STREAM:
        raise ConfigError(f"client numbers must lie in [0, {kernels.DOWNLINK_STREAM}), got {client}")
    return client


def _scale(sigma: list[float]) -> Tensor:
    """Noise scales as float32, never below what the plan says."""
    exact = np.array(sigma)
    if (exact[exact > 0] < 2.0**-100).any() or (exact > 2.0**100).any():
        raise PrivacyError(f"the kernels draw noise of scale 0 or in [2^-100, 2^100], got {exact.tolist()}")
    scale = exact.astype(np.float32)
    return torch.from_numpy(np.where(scale < exact, np.nextafter(scale, np.float32(np.inf)), scale))
