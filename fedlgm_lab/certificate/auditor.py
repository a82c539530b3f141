"""Level 2 of the checks: an auditor opens the commitment, draws the noise again and subtracts it
from the releases.

The auditor sees the sums without noise, so the auditor must be as trusted as the server. The noise
of a release depends on the release's sum (see `fedlgm.noise.release.Noising`), so the auditor needs
the sums, which are in the run's folder `private/`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy import stats

from fedlgm.errors import FedlgmError
from fedlgm.files import explain_failure
from fedlgm.noise.draws import NoiseBackend, grid_step
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER
from fedlgm_lab.certificate.beacon import beacon_text, commitment_of, noise_root
from fedlgm_lab.certificate.verifier.case import Case
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused, is_signed
from fedlgm_lab.certificate.verifier.replay import read_vectors

CONFIDENCE = 0.999
_BACKENDS = ("cpu", "torch")
_ROUNDING = 1 + 1e-6  # tolerance for the rounding of float64, in steps of the grid
NOT_COVERED = (
    (
        "that each contribution was bounded, that there are as many units as stated, and that they "
        "were drawn as stated"
    ),
    (
        "that the operator did not try several sums that differ in their last digits, whose noise "
        "differs, and keep one of them"
    ),
    "that the sums are those of the stated data",
)
"""What level 2 does not show."""


@dataclass(frozen=True)
class Levels:
    """Levels of the tests of an audit that an honest run can fail by chance.

    By the union bound, an honest run is refused with a probability of at most 1 - confidence. One
    half of this probability is divided among the slopes of all layers and rounds, and the other
    half among the cohort sizes of all rounds.

    Attributes:
        slope: level of the two-sided test of a layer's slope in a round.
        cohort: level of the bound on a round's number of participants.

    Example:
        >>> Levels.of(0.99, layers=5, rounds=10).cohort
        0.0005
    """

    slope: float
    cohort: float

    @classmethod
    def of(cls, confidence: float, layers: int, rounds: int) -> Levels:
        """Compute the levels for an audit of this number of layers and rounds."""
        half = round(1 - confidence, 12) / 2
        return cls(half / (layers * rounds), half / rounds)


@dataclass(frozen=True)
class Audited:
    """The outcome of a level-2 audit whose checks all hold.

    Attributes:
        confidence: least probability with which an honest run passes.
        rounds: number of rounds.
        error: largest standard error of a layer's slope in one round.
    """

    confidence: float
    rounds: int
    error: float

    def lines(self) -> list[str]:
        """Describe the outcome in sentences."""
        return [
            (
                f"Level 2 holds: in each of {self.rounds} rounds and every layer, the release is a "
                "bounded sum plus exactly the committed noise, at full scale. An honest run passes "
                f"with a probability of at least {self.confidence:.3%}."
            ),
            *(f"Not covered by level 2: {line}" for line in NOT_COVERED),
        ]


def audit(case: Case, private: Path, confidence: float = CONFIDENCE) -> Audited:
    """Make checks 15 to 18 of a certificate.

    Args:
        case: a certificate that passed level 1, with its releases.
        private: the run's folder `private/`, with `opening.json` and `sums/`.
        confidence: probability with which an honest run must pass.

    Raises:
        Refused: a check does not hold; the message names the round.
        NotCheckable: files are missing, or the noise cannot be drawn on this machine.
    """
    ring, backend = _open(case, private)
    table = LayerTable.from_sizes({name: size for name, size, _ in case.start["layers"]})
    levels = Levels.of(confidence, len(table), len(case.rounds))
    assert case.releases is not None
    vectors = read_vectors(case.releases, case.start["initial"], case.rounds)
    next(vectors)
    errors, run_noise = [0.0], RunNoise()
    for entry, released, read in zip(case.rounds, vectors, case.plans, strict=True):
        number, text = entry["round"], case.predicate["plans"][entry["plan"]]
        try:
            plan = ReleasePlan.from_json(table, text)
            if read.joint:
                plan = replace(plan, position=number - 1)
        except FedlgmError as error:
            raise Refused(5, f"the plan of round {number} is not a plan ({error})") from None
        exact = _sum(private / "sums" / f"round-{number:06d}.f64", plan.size, number)
        key = case.charges[entry["row"] - 1]["key"]
        release = plan, ring, number, key, exact, released
        errors.append(check_release(*release, levels, backend, run_noise))
    return Audited(confidence, len(case.rounds), max(errors))


def _open(case: Case, private: Path) -> tuple[KeyRing, NoiseBackend]:
    """Check 15: the commitment opens, and the beacon is a named auditor's."""
    noise = case.start["noise"]
    if case.claim["trust"] != "central":
        raise NotCheckable(
            f"check 15: under {case.claim['trust']} trust the clients drew the noise, so the "
            "server cannot open it: ask the clients for the statements of their own ledgers"
        )
    if noise is None:
        raise Refused(15, "the run had a public seed, so nobody committed to its noise")
    if noise["backend"] not in _BACKENDS:
        raise NotCheckable(f"noise of the generator {noise['backend']!r} cannot be drawn here")
    raw = _opening(private / "opening.json")
    root, nonce = bytes.fromhex(raw["root"]), bytes.fromhex(raw["nonce"])
    if commitment_of(root, nonce) != noise["commitment"]:
        raise Refused(15, f"root and nonce do not open the commitment {noise['commitment']}")
    text = beacon_text(noise["commitment"], noise["beacon"])
    if noise["by"] == "operator":
        raise Refused(
            15,
            "the operator drew the beacon itself, so it could choose among many noises: train with "
            "run.beacon, which an auditor answers",
        )
    if not is_signed(noise["by"], noise["signature"], text):
        raise Refused(15, f"the beacon is not signed by {noise['by']} for this commitment")
    if noise["by"] not in case.witnesses or noise["by"] == case.signer:
        raise Refused(
            15,
            f"the beacon is by {noise['by']}, which is not an auditor whom you named (--witness)",
        )
    secret = noise_root(root, bytes.fromhex(noise["beacon"]))
    return KeyRing(secret, secret=True), cast(NoiseBackend, noise["backend"])


def _opening(path: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
        if len(bytes.fromhex(raw["root"])) != 32 or len(bytes.fromhex(raw["nonce"])) != 32:
            raise ValueError("root and nonce must have 32 bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotCheckable(explain_failure(f"{path} does not open a commitment", error)) from None
    return raw


def _sum(path: Path, size: int, number: int) -> torch.Tensor:
    try:
        values = np.frombuffer(path.read_bytes(), "<f8").copy()
    except (OSError, ValueError) as error:
        raise NotCheckable(explain_failure(f"{path} cannot be read", error)) from None
    if len(values) != size or not np.isfinite(values).all():
        raise Refused(16, f"the sum of round {number} must have {size} finite numbers")
    return torch.from_numpy(values)


def check_release(
    plan: ReleasePlan,
    ring: KeyRing,
    number: int,
    key: str,
    exact: torch.Tensor,
    released: np.ndarray,
    levels: Levels,
    backend: NoiseBackend = "cpu",
    run_noise: RunNoise | None = None,
) -> float:
    """Make checks 16 to 18 of one release.

    Args:
        plan: the round's plan.
        ring: ring of the run's keys.
        number: number of the round.
        key: name of the noise in the ledger's charge.
        exact: the sum before noise, from the operator's files, float64 [plan.size].
        released: the released sum, float64 [plan.size].
        levels: levels of the tests that can fail by chance.
        backend: generator of the noise.
        run_noise: noise of the earlier rounds, if the noise is correlated over the rounds.

    Returns:
        The largest standard error of a layer's slope.

    Raises:
        Refused: a check does not hold; the message names the check, the round and the layer.
    """
    if len(released) != plan.size or not np.isfinite(released).all():
        raise Refused(13, f"the release of round {number} must have {plan.size} finite numbers")
    noising = Noising.of(exact, plan, ring, number, SERVER, backend, run_noise)
    if noising.name != key:
        raise Refused(
            16, f"round {number} is charged with the noise {key}, but its key is {noising.name}"
        )
    noise = replace(noising, total=torch.zeros(plan.size, dtype=torch.float64)).add_().numpy()
    cohort, place, errors = _largest_cohort(plan, levels.cohort), 0, [0.0]
    for part in plan.parts:
        z, v = noise[place : place + part.size], released[place : place + part.size]
        x = exact.numpy()[place : place + part.size]
        place += part.size
        step, where = grid_step(part.sigma), f"layer {part.name} of round {number}"
        rest = v - z
        # A sum may depend on the noise of earlier rounds. If the noise is correlated over the
        # rounds, the sum then also depends on the noise of this round.
        if plan.family == "gaussian" and plan.facts.noise is None:
            errors.append(_check_slope(z, rest, levels.slope, where))
        if np.abs(rest - x).max(initial=0.0) > step * _ROUNDING:
            raise Refused(17, f"{where} is not its sum plus the committed noise")
        order, most = (2, math.sqrt(part.size)) if plan.family == "gaussian" else (1, part.size)
        norm, limit = float(np.linalg.norm(rest, order)), cohort * part.clip + step * most
        if norm > limit * _ROUNDING:
            raise Refused(
                18,
                f"{where}, without its noise, has the norm {norm:.4g}; bounded contributions of "
                f"{cohort} {plan.guarantee.unit}s have at most {limit:.4g}",
            )
    return max(errors)


def _check_slope(z: np.ndarray, rest: np.ndarray, level: float, where: str) -> float:
    """Refuse a layer whose release, without the noise, is not independent of the noise. Return the
    standard error of the slope.

    The slope of v on z is 1 + r |rest| / |z|, where r is the cosine between rest and z. The
    direction of Gaussian noise is uniform, so for an honest release r^2 has a Beta(1/2, (d - 1)/2)
    distribution, whatever the sum is.
    """
    size, square, length = len(z), float(z @ z), float(np.linalg.norm(rest))
    if size < 2 or square == 0 or length == 0:
        return 0.0
    error = length / math.sqrt(square * size)
    slope, largest = 1 + float(z @ rest) / square, stats.beta.isf(level, 0.5, (size - 1) / 2)
    if (slope - 1) ** 2 > largest * size * error**2:
        raise Refused(
            17,
            f"{where} has {slope:.4f} times its noise, where 1 +- "
            f"{math.sqrt(largest * size) * error:.4f} would be right",
        )
    return error


def _largest_cohort(plan: ReleasePlan, level: float) -> int:
    """Return a number of participants that a round exceeds with at most this probability."""
    sampling = plan.facts.sampling
    if sampling.scheme in ("fixed", "min-separation"):
        return round(sampling.expected)
    return int(stats.binom.isf(level, sampling.population, sampling.rate))
