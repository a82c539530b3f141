"""Level 2: cheats while training that level 1 cannot see, and honest releases that must pass."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm import Guarantee, RunFacts, Sampling
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising, fingerprint
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.certificate import auditor
from fedlgm_lab.certificate.auditor import Levels, audit, check_release
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from tests.support.certificates import ROUNDS, Certified, certified_run, fit

Cheat = Callable[[Noising, torch.Tensor], torch.Tensor]
_add = Noising.add_


def _first_layer(noising: Noising) -> slice:
    return slice(0, noising.plan.parts[0].size)


def _no_noise(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    return noise * (0.0 if noising.round == 3 else 1.0)


def _half(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    return noise / 2


def _nine_tenths(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    return noise * 0.9


def _other_key(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    other = dataclasses.replace(noising, total=torch.zeros_like(noise), ring=KeyRing(5))
    return _add(other)


def _earlier(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    if noising.round == 2:
        _earlier.kept = noise.clone()  # type: ignore[attr-defined]
    return _earlier.kept if noising.round == 4 else noise  # type: ignore[attr-defined]


def _one_layer(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    noise = noise.clone()
    noise[_first_layer(noising)] = 0
    return noise


def _long(noising: Noising, noise: torch.Tensor) -> torch.Tensor:
    return noise + 40.0


CHEATS: dict[str, Cheat] = {
    "36 no noise in one round": _no_noise,
    "37 half of the noise": _half,
    "nine tenths of the noise": _nine_tenths,
    "38 noise of another key": _other_key,
    "39 the noise of an earlier round": _earlier,
    "40 one layer without noise": _one_layer,
    "41 a long sum": _long,
}


def _audit(run: Certified, **more: Any) -> auditor.Audited:
    case = run.verify(run.sign(run.statement))
    return audit(case, run.run / "private", **more)


def test_an_honest_run_passes_level_2(honest: Certified) -> None:
    audited = _audit(honest)
    assert audited.rounds == ROUNDS
    assert audited.lines()[0].startswith("Level 2 holds")


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_while_training_passes_level_1_and_not_level_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cheating(self: Noising) -> torch.Tensor:
        noise = _add(dataclasses.replace(self, total=torch.zeros_like(self.total)))
        return self.total.add_(CHEATS[name](self, noise))

    monkeypatch.setattr(Noising, "add_", cheating)
    run = certified_run(tmp_path)
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"check 1[78]"):
        _audit(run)


def test_a_sum_of_unbounded_contributions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # 41, where the kept sum is as long as the released one
    plain = Noising.of.__func__  # type: ignore[attr-defined]

    def longer(cls: type[Noising], total: torch.Tensor, *rest: Any, **more: Any) -> Noising:
        noising: Noising = plain(cls, total.mul_(50.0), *rest, **more)
        return noising

    monkeypatch.setattr(Noising, "of", classmethod(longer))
    run = certified_run(tmp_path)
    monkeypatch.undo()
    with pytest.raises(Refused, match=r"check 18: .* bounded contributions of"):
        _audit(run)


@pytest.mark.parametrize("name", ["commitment", "beacon"])
def test_another_commitment_or_beacon_is_refused_though_all_heads_fit(
    honest: Certified, name: str
) -> None:  # 23, 24
    statement = honest.copy()
    statement["predicate"]["start"]["noise"][name] = "ab" * 32
    statement["predicate"]["anchors"] = []
    case = honest.verify(honest.sign(fit(statement)), accepts=["unanchored"])
    with pytest.raises(Refused, match="check 15"):
        audit(case, honest.run / "private")


def test_plans_with_more_noise_are_refused_though_all_heads_fit(honest: Certified) -> None:  # 14
    from tests.support.certificates import edit_plans

    statement = honest.copy()
    edit_plans(statement, lambda plan: plan.update(sigma=[2 * s for s in plan["sigma"]]))
    statement["predicate"]["anchors"] = []
    case = honest.verify(honest.sign(fit(statement)), accepts=["unanchored"])
    with pytest.raises(Refused, match="check 16"):
        audit(case, honest.run / "private")


def test_a_beacon_of_the_operator_or_of_a_stranger_is_refused(
    honest: Certified, tmp_path: Path
) -> None:
    run = certified_run(tmp_path, beacon=False)
    with pytest.raises(Refused, match="check 15: the operator drew the beacon itself"):
        _audit(run)
    case = honest.verify(honest.sign(honest.statement), witnesses=[], accepts=["unanchored"])
    with pytest.raises(Refused, match=r"check 15: .* not an auditor whom you named"):
        audit(case, honest.run / "private")


def test_another_opening_and_damaged_files_are_refused(honest: Certified, tmp_path: Path) -> None:
    private = tmp_path / "private"
    shutil.copytree(honest.run / "private", private)
    case = honest.verify(honest.sign(honest.statement))
    raw = json.loads((private / "opening.json").read_text())
    (private / "opening.json").write_text(json.dumps(raw | {"root": "ab" * 32}))
    with pytest.raises(Refused, match="check 15: root and nonce"):
        audit(case, private)
    (private / "opening.json").write_text("{}")
    with pytest.raises(NotCheckable, match="does not open"):
        audit(case, private)
    shutil.copy(honest.run / "private" / "opening.json", private / "opening.json")
    changed = private / "sums" / "round-000002.f64"
    values = np.frombuffer(changed.read_bytes()).copy()
    changed.write_bytes(np.nextafter(values, np.inf).tobytes())  # in the last digits
    with pytest.raises(Refused, match="check 16: round 2"):
        audit(case, private)
    changed.unlink()
    with pytest.raises(NotCheckable, match="cannot be read"):
        audit(case, private)


def test_the_private_files_are_the_operators_alone(honest: Certified) -> None:
    for path in (honest.run / "private").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (honest.run.parent / "operator.pem").stat().st_mode & 0o777 == 0o600


def _release(
    rng: np.random.Generator, sizes: list[int], scale: float
) -> tuple[ReleasePlan, KeyRing, int, str, torch.Tensor, np.ndarray]:
    layers = LayerTable.from_sizes({f"layer {j}": size for j, size in enumerate(sizes)})
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.2), rounds=500)
    clip = rng.uniform(0.1, 2.0, len(sizes))
    sigma = clip * rng.uniform(0.5, 3.0) * np.sqrt(len(sizes))
    plan = ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "an example"))
    count, parts = int(rng.binomial(100, 0.2)), []
    for size, bound in zip(sizes, clip, strict=True):
        direction = rng.standard_normal(size)
        parts.append(scale * count * bound * direction / np.linalg.norm(direction))
    exact, ring = torch.from_numpy(np.concatenate(parts)), KeyRing(int(rng.integers(2**62)), True)
    noising = Noising.of(exact.clone(), plan, ring, 1)
    return plan, ring, 1, noising.name, exact, noising.add_().numpy()


def test_500_honest_releases_give_no_false_alarm() -> None:
    rng, levels = np.random.default_rng(3), Levels.of(0.999, layers=3, rounds=500)
    for _ in range(500):
        check_release(*_release(rng, [200, 30, 2], rng.uniform(0, 1)), levels)


def test_the_slope_alone_finds_a_tenth_of_the_noise_missing() -> None:
    """With a statement of the sums that fits, which no operator can compute."""
    rng, levels, refused = np.random.default_rng(4), Levels.of(0.999, layers=2, rounds=20), 0
    for _ in range(20):
        plan, ring, number, _, exact, _ = _release(rng, [2080, 330], 0.3)
        noising = Noising.of(exact.clone(), plan, ring, number)
        zeros = torch.zeros_like(exact)
        noise = dataclasses.replace(noising, total=zeros).add_().numpy()
        try:
            auditor._check_slope(
                noise[:2080], (exact.numpy() - 0.1 * noise)[:2080], levels.slope, ""
            )
        except Refused:
            refused += 1
    assert refused == 20


@settings(max_examples=30)
@given(st.integers(2, 40), st.integers(0, 10_000))
def test_the_slope_of_an_independent_rest_has_the_stated_level(size: int, seed: int) -> None:
    """At level 0.2, 400 independent rests are refused about 80 times: neither more nor far fewer."""
    rng, refused = np.random.default_rng(seed), 0
    rest = rng.standard_normal(size)
    for _ in range(400):
        try:
            auditor._check_slope(rng.standard_normal(size), rest, 0.2, "")
        except Refused:
            refused += 1
    assert 40 <= refused <= 125


def test_the_name_of_a_seeds_noise_is_not_that_of_a_secret_ring() -> None:
    assert fingerprint(KeyRing(3), 1) == fingerprint(KeyRing(3, True), 1)  # of the ring alone
    total = torch.zeros(4, dtype=torch.float64)
    layers, facts = LayerTable.from_sizes({"a": 4}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
    plan = ReleasePlan(layers, [1.0], [1.0], facts, Guarantee("proven", "an example"))
    assert (
        Noising.of(total, plan, KeyRing(3), 1).name
        != Noising.of(total, plan, KeyRing(3, True), 1).name
    )
