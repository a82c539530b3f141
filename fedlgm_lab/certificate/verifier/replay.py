"""Checks 12 and 13, which read the model file and recompute the model from the released vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from fedlgm.files import explain_failure
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, must
from fedlgm_lab.certificate.verifier.plans import Plan

STEPS = ("sgd", "momentum")
ARITHMETIC = ("fused", "separate")
"""Rounding of a x + y on the processor that trained: only at the end, or also after the product."""


def flat_model(data: bytes, layers: list[Any], fixed: dict[str, str]) -> np.ndarray:
    """Read the trained parameters of a safetensors file as one vector, float32 [D].

    Args:
        data: content of the file.
        layers: [layer, size, [[tensor, size], ...]] of each layer, in order.
        fixed: SHA-256 of the file's other tensors before round 1, by name.

    Raises:
        Refused: the file has other tensors, or tensors of other sizes.
        NotCheckable: the file is not a safetensors file, or is not in float32.
    """
    try:
        tensors = dict(deserialize(data))
    except SafetensorError as error:
        raise NotCheckable(f"the model is not a safetensors file ({error})") from None
    trained = [(name, size) for _, _, slots in layers for name, size in slots]
    same = sorted([*(name for name, _ in trained), *fixed]) == sorted(tensors)
    must(12, same, "the model file has other tensors than the certificate states")
    for name, digest in fixed.items():
        same = hashlib.sha256(tensors[name]["data"]).hexdigest() == digest
        must(
            12,
            same,
            f"the tensor {name} was not trained, but differs from its values before round 1",
        )
    parts = []
    for name, size in trained:
        tensor = tensors[name]
        if tensor["dtype"] != "F32":
            raise NotCheckable(f"the tensor {name} is {tensor['dtype']}, not float32")
        parts.append(np.frombuffer(tensor["data"], "<f4"))
        length = len(parts[-1])
        must(12, length == size, f"the tensor {name} has {length} numbers, not {size}")
    return np.concatenate(parts)


def read_vectors(folder: Path, initial: str, rounds: list[dict[str, Any]]) -> Iterator[np.ndarray]:
    """Yield the initial weights (float32), and then every released sum (float64).

    Args:
        folder: folder of the vectors.
        initial: SHA-256 of the initial weights.
        rounds: number and SHA-256 of each round's vector, as in the certificate.

    Raises:
        Refused: a vector has another SHA-256.
        NotCheckable: a file cannot be read.
    """
    files = [("initial.f32", initial, "<f4", "the initial weights are")]
    for entry in rounds:
        name, where = f"round-{entry['round']:06d}.f64", f"round {entry['round']} is"
        files.append((name, entry["released"], "<f8", where))
    for name, digest, dtype, where in files:
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            what = f"the releases of {folder} cannot be read"
            raise NotCheckable(explain_failure(what, error)) from None
        same = hashlib.sha256(data).hexdigest() == digest
        must(13, same, f"{where} not the vector with the SHA-256 {digest}")
        yield np.frombuffer(data, dtype)


def replay(
    vectors: Iterator[np.ndarray],
    plans: list[Plan],
    sizes: np.ndarray,
    step: tuple[str, float, float],
    arithmetic: str,
    charged: Container[int],
) -> np.ndarray:
    """Compute the model that follows from the initial weights, the released sums and the server's
    step, float32 [D].

    Args:
        vectors: see `read_vectors`.
        plans: plan of each round, [T].
        sizes: coordinates of each layer, [K].
        step: name, learning rate and momentum.
        arithmetic: see `ARITHMETIC`.
        charged: rounds that the ledger charges.

    Raises:
        Refused: a vector does not have the size that its plan states, is not finite, or is not zero
            although the ledger charges nobody in this round.
    """
    name, lr, momentum = step
    model, speed = next(vectors).copy(), None
    length, right = len(model), sizes.sum()
    must(13, length == right, f"the initial weights have {length} numbers, not {right}")
    times_plus = fused if arithmetic == "fused" else separate
    for number, (plan, released) in enumerate(zip(plans, vectors, strict=True), start=1):
        mask = np.repeat(plan.released, sizes)
        finite = len(released) == mask.sum() and np.isfinite(released).all()
        must(13, finite, f"round {number} must have {mask.sum()} finite numbers")
        empty = number in charged or not released.any()
        must(13, empty, f"round {number} releases a sum, but the ledger charges nobody")
        mean = np.zeros(len(model), np.float32)
        mean[mask] = (released / plan.sampling.expected).astype(np.float32)
        if name == "momentum" and momentum != 0:
            # torch's SGD holds the negative of this buffer; the sign has no effect on rounding
            speed = mean if speed is None else speed * np.float32(momentum) + mean
            mean = speed
        model = times_plus(mean, np.float32(lr), model)
    return model


def separate(x: np.ndarray, a: np.float32, y: np.ndarray) -> np.ndarray:
    """Compute a x + y in float32, rounded after the product and after the sum."""
    return a * x + y


def fused(x: np.ndarray, a: np.float32, y: np.ndarray) -> np.ndarray:
    """Compute a x + y in float32, rounded only once, as by a fused multiply-add instruction.

    The product is exact in float64. The sum is rounded to odd in float64. Rounding the result to
    float32 then gives the same value as rounding the exact sum (Boldo and Melquiond 2008).

    Example:
        >>> x = np.float32([1 + 2**-12])
        >>> float(fused(x, x[0], np.float32([-1.0]))[0]) == (1 + 2**-12) ** 2 - 1
        True
    """
    product, wide = x.astype(np.float64) * np.float64(a), y.astype(np.float64)
    total = product + wide
    part = total - product
    rest = (product - (total - part)) + (wide - part)  # the exact rounding error of the sum
    odd = (rest != 0) & ((total.view(np.int64) & 1) == 0)
    return np.where(odd, np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)), total).astype(
        np.float32
    )
