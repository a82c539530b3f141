"""A release is the bounded sum plus the plan's noise, and the noise is bound to what is
released."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedlgm.aggregation import bound_update
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.draws import grid_step
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import (
    SERVER,
    Noising,
    fingerprint,
    local_release,
    local_releases,
    release,
)
from fedlgm.noise.run_noise import kernel_scale
from fedlgm.planning.plan import ReleasePlan
from tests.support.noise_plans import LAWS, SIGMA, plan


@pytest.mark.parametrize("family", LAWS)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_every_backend_draws_the_plans_law(family, backend):
    made = plan(family)
    flat = release(torch.zeros(made.size), made, KeyRing(1), 3, backend=backend)
    for part, scale in zip(made.layers.split(flat), SIGMA, strict=True):
        values = part.double().numpy()
        if len(values) >= 100:
            assert (
                stats.kstest(values, LAWS[family](scale=scale).cdf).pvalue > 1e-6
            )  # another rounding is another draw
            assert stats.kstest(values, LAWS[family](scale=scale * 1.2).cdf).pvalue < 1e-9
    again = release(torch.zeros(made.size), made, KeyRing(1), 3, backend=backend)
    assert torch.equal(again, flat)
    other = {"cpu": "torch", "torch": "cpu"}[backend]
    assert not torch.equal(
        release(torch.zeros(made.size), made, KeyRing(1), 3, backend=other), flat
    )


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("seed", [1, None])
def test_sums_that_cannot_hold_their_noise_are_refused(kind, seed):
    """A sum in float16 came back without any noise of a scale of 1e-10."""
    made = plan(sizes={"a": 4}, sigma=np.full(1, 1e-10))
    with pytest.raises(ConfigError, match="a sum must be float32 or float64"):
        release(torch.zeros(4, dtype=kind), made, KeyRing.from_seed(seed), 1)


@pytest.mark.parametrize("sigma", [1e-35, 1e35])
def test_scales_at_which_noise_or_its_grid_vanish_are_refused(sigma):
    made = plan(sizes={"a": 4}, sigma=np.full(1, sigma))
    with pytest.raises(PrivacyError, match=r"in \[2\^-100, 2\^100\]"):
        release(torch.zeros(4, dtype=torch.float64), made, KeyRing(1), 1)


def test_kernel_noise_never_repeats_between_parties_rounds_and_layers():
    made = plan(sizes={"a": 400, "b": 400}, sigma=np.ones(2))
    zeros = [torch.zeros(800) for _ in range(6)]
    drawn = [
        release(zeros.pop(), made, KeyRing(0), r, p, "torch") for r in (1, 2) for p in (SERVER, 0)
    ]
    drawn.append(release(zeros.pop(), made, KeyRing(1), 1))
    halves = np.stack([half.numpy() for flat in drawn for half in flat.split(400)])
    assert np.abs(np.corrcoef(halves) - np.eye(len(halves))).max() < 5 / math.sqrt(400)


def test_nothing_on_a_device_is_noised_on_the_cpu_and_no_backend_runs_where_it_cannot():
    made = plan()
    with pytest.raises(ConfigError, match="these are on meta: use 'torch' or 'triton'"):
        release(torch.zeros(made.size, device="meta"), made, KeyRing(0), 1)
    with pytest.raises(ConfigError, match="these are on meta"):
        local_release(None, made, KeyRing(0), 1, 0, device="meta")
    assert (
        release(
            torch.zeros(made.size, device="meta"), made, KeyRing(0), 1, backend="torch"
        ).device.type
        == "meta"
    )
    with pytest.raises(ConfigError, match="client must be a whole number, 0 to "):
        release(torch.zeros(made.size), made, KeyRing(0), 1, 2**32 - 1, "torch")
    tiny = plan(sigma=np.full(4, 1e-35))
    with pytest.raises(PrivacyError, match="2\\^-100"):
        release(torch.zeros(tiny.size), tiny, KeyRing(0), 1, backend="torch")


def test_kernel_scales_are_never_below_the_plans():
    scales = np.random.default_rng(0).uniform(0.1, 10, 1000)
    assert (kernel_scale(scales.tolist()).double().numpy() >= scales).all()
    np.testing.assert_allclose(kernel_scale(scales.tolist()), scales, rtol=2e-7)


def test_backends_have_names_of_their_own_in_the_ledger():
    names = {fingerprint(KeyRing(0), 1, SERVER, backend) for backend in ("cpu", "torch", "triton")}
    assert len(names) == 3
    assert fingerprint(KeyRing(0), 1) in names


class TestLocalRelease:
    """One client's own release under local trust."""

    KEYS = KeyRing(5)

    @staticmethod
    def made(family: str = "gaussian") -> ReleasePlan:
        return plan(family, sizes={"a": 20_000, "b": 20_000}, sigma=np.array([0.3, 5.0]))

    @staticmethod
    def update(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(1, 40_000, generator=torch.Generator().manual_seed(1))

    @pytest.mark.parametrize("family", LAWS)
    @pytest.mark.parametrize("backend", ["cpu", "torch"])
    def test_it_is_the_bounded_contribution_and_the_plans_noise(self, family, backend):
        made = self.made(family)
        own, _ = local_release(self.update(), made, self.KEYS, 2, 3, backend)
        noise = (own - bound_update(self.update(), made)).numpy()
        for part, scale in zip(np.split(noise, 2), (0.3, 5.0), strict=True):
            assert (
                stats.kstest(part, LAWS[family](scale=scale).cdf).pvalue > 1e-6
            )  # another rounding is another draw
            assert stats.kstest(part, LAWS[family](scale=scale * 1.2).cdf).pvalue < 1e-9
        values = own.split(20_000)
        assert all(
            torch.equal(v, (v / grid_step(s)).round() * grid_step(s))
            for v, s in zip(values, (0.3, 5.0), strict=True)
        )

    @pytest.mark.parametrize("backend", ["cpu", "torch"])
    def test_the_same_data_is_answered_with_the_same_bits_and_other_data_with_other_noise(
        self, backend
    ):
        """Elsewhere the difference of two answers would be the difference of the data, without
        noise."""
        made, noises, names = self.made(), [], []
        asked = {
            "again": (1.0, 2, 3),
            "data": (0.99, 2, 3),
            "round": (1.0, 3, 3),
            "client": (1.0, 2, 4),
        }
        for scale, round_, client in ((1.0, 2, 3), *asked.values()):
            own, name = local_release(self.update(scale), made, self.KEYS, round_, client, backend)
            noises.append((own - bound_update(self.update(scale), made)).numpy())
            names.append(name)
        assert names[0] == names[1]
        assert np.array_equal(noises[0], noises[1])
        assert len(set(names)) == 4
        assert np.abs(np.corrcoef(noises[1:]) - np.eye(4)).max() < 5 / math.sqrt(40_000)

    def test_data_that_the_bound_makes_equal_is_one_release(self):
        """Nothing that leaves tells them apart: the layer's direction is all that is left of
        them."""
        large = torch.cat([torch.full((1, 20_000), 8.0), torch.zeros(1, 20_000)], dim=1)
        one, other = (
            local_release(scale * large, self.made(), self.KEYS, 1, 0) for scale in (1.0, 4.0)
        )
        assert one[1] == other[1]
        assert torch.equal(one[0], other[0])

    def test_clients_without_data_and_broken_ones_release_their_noise_alone(self):
        made = self.made()
        none, _ = local_release(None, made, self.KEYS, 1, 0)
        broken, _ = local_release(torch.full((1, 40_000), math.nan), made, self.KEYS, 1, 0)
        assert torch.equal(none, broken)
        assert float(none[:20_000].std()) == pytest.approx(0.3, rel=0.03)

    @pytest.mark.parametrize("family", LAWS)
    @pytest.mark.parametrize("backend", ["cpu", "torch"])
    @pytest.mark.parametrize("root", [KEYS, KeyRing(5, secret=True)])
    def test_several_clients_release_what_each_releases_alone(self, family, backend, root):
        made = self.made(family)
        broken = torch.full((1, 40_000), math.nan)
        updates, clients = (
            torch.cat([self.update(), self.update(0.5), broken, self.update()]),
            [3, 0, 7, 2],
        )
        totals, names = local_releases(updates, made, root, 2, clients, backend)
        for row, client in enumerate(clients):
            alone, name = local_release(updates[row : row + 1], made, root, 2, client, backend)
            assert torch.equal(totals[row], alone)
            assert names[row] == name
        assert len(set(names)) == len(clients)  # also where two clients have the same data


def test_noise_of_a_secret_ring_depends_on_what_is_released():
    secret, public, sums = (
        KeyRing(7, secret=True),
        KeyRing(7),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-30])),
    )
    made = plan()

    def ring(keys: KeyRing, total: torch.Tensor) -> KeyRing:
        return Noising.of(total, made, keys, 1).ring

    assert len({ring(secret, total).root for total in sums}) == 2
    assert ring(secret, sums[0]) == ring(secret, torch.zeros(3))
    assert ring(secret, sums[0]).secret
    assert all(
        ring(public, total) == public for total in sums
    )  # the seed alone gives this noise to anyone
