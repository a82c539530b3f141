"""The one door through which anything private leaves: noise exactly as the plan says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import kernels
from fedlgm.aggregation.device_sum import ClientNoise, DeviceSum, part_offsets
from fedlgm.clipping import BoundedSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.noise import NoiseBackend, add_noise_
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER

__all__ = ["SERVER", "add_downlink_", "add_released", "fingerprint", "release"]


def release(
    total: Tensor, plan: ReleasePlan, keys: KeyRing, round: int, party: int = SERVER, backend: NoiseBackend = "cpu"
) -> Tensor:
    """Add the plan's noise to a bounded sum, in place. Charge the ledger with `plan.event` BEFORE calling this.

    Args:
        total: sum of bounded contributions (central trust) or one client's own (local trust), [plan.size] float64 (or
            float32, if the sum is exact in it).
        plan: the round's plan.
        keys: secret key ring of the noising party.
        round: round number, from 1.
        party: `SERVER`, or the client's number under local trust.
        backend: who draws: "cpu" (Mersenne Twister streams; `total` must be on the CPU), or the kernels' Philox in
            "torch" or "triton" on the device of `total`. The law is the same, the bits are not.

    Returns:
        `total`, now safe to publish to the degree that `plan.guarantee` says.

    Raises:
        ConfigError: a backend that does not run on the device of `total`.
        PrivacyError: a noise scale that the kernels cannot represent.
    """
    if backend == "cpu":
        _check_cpu(total)
        layers = [int(j) for j in plan.indices] + [len(plan.layers) + i for i in range(len(plan.sides))]
        streams = [keys.torch(Purpose.NOISE, round, party + 1, layer) for layer in layers]
        return add_noise_(total, [(size, sigma) for _, size, _, sigma in plan.parts], streams, plan.family)
    if plan.size == 0:
        return total
    stream = kernels.SERVER_STREAM if party == SERVER else _stream(party)
    scale = _scale([sigma for _, _, _, sigma in plan.parts]).to(total.device)
    key = kernels.noise_key(keys, round)
    return kernels.add_noise_(total, part_offsets(plan), scale, plan.family, key, stream, backend=backend)


def add_released(
    block: BoundedSum,
    updates: Tensor | None,
    clients: Sequence[int],
    plans: Sequence[ReleasePlan],
    keys: KeyRing,
    round: int,
    backend: NoiseBackend = "cpu",
) -> None:
    """Bound each client's update, add the client's own noise and add the result to `block` (local trust).

    Args:
        block: the block's sum.
        updates: [b, D], one row a client; None for clients without data, who add noise alone.
        clients: the b clients' numbers.
        plans: by which these clients bound and noise: one that all share, or each client's own.
        keys: secret key ring of the clients.
        round: round number, from 1.
        backend: see `release`.

    Raises:
        ConfigError: a backend that does not run where the sum lies.
        PrivacyError: a noise scale that the kernels cannot represent.
    """
    if backend == "cpu":
        _check_cpu(block.total)
    if isinstance(block, DeviceSum) and all(plan is block.plan for plan in plans):
        device, plan = block.total.device, block.plan
        scale = _scale([sigma for _, _, _, sigma in plan.parts]).to(device)
        streams = torch.tensor([_stream(client) for client in clients], device=device)
        noise = ClientNoise(scale, kernels.noise_key(keys, round), streams)
        block.skip(len(clients), noise) if updates is None else block.add(updates, noise)
        return
    for row, client in enumerate(clients):
        own = BoundedSum.empty(plans[row % len(plans)])
        if updates is None:
            own.skip(1)
        else:
            own.add(updates[row].cpu())
        noisy = release(own.total.to(block.total), own.plan, keys, round, client, backend)
        block.merge(noisy, own.count, own.discarded)


def add_downlink_(mean: Tensor, plan: ReleasePlan, keys: KeyRing, round: int, backend: NoiseBackend = "cpu") -> Tensor:
    """Add the plan's broadcast noise to every coordinate of a released mean [plan.size], in place; nothing if it is 0.

    For local trust only, where the server's own streams add no other noise.
    """
    if plan.downlink == 0:
        return mean
    if backend == "cpu":
        _check_cpu(mean)
        return add_noise_(mean, [(mean.numel(), plan.downlink)], [keys.torch(Purpose.NOISE, round, SERVER + 1)])
    offsets, scale = torch.tensor([0, mean.numel()]), _scale([plan.downlink]).to(mean.device)
    key = kernels.noise_key(keys, round)
    return kernels.add_noise_(mean, offsets, scale, "gaussian", key, kernels.DOWNLINK_STREAM, backend=backend)


def fingerprint(keys: KeyRing, round: int, party: int = SERVER, backend: NoiseBackend = "cpu") -> str:
    """Public name of a release's noise key, for the ledger: equal names mean equal noise."""
    words = keys.words(8, Purpose.NOISE, round, party + 1).tobytes()
    return hashlib.sha256(words if backend == "cpu" else words + backend.encode()).hexdigest()[:32]


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
