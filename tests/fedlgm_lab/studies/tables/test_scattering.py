"""The scattering transform has the properties that its definition gives it."""

from __future__ import annotations

import pytest
import torch

from fedlgm_lab.studies.tables.scattering import Scattering, normalise_groups

SCATTERING = Scattering(16)
IMAGES = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def test_a_constant_image_has_only_its_mean() -> None:
    features = SCATTERING(torch.full((1, 1, 16, 16), 0.7))[0]
    torch.testing.assert_close(features[0], torch.full((4, 4), 0.7), atol=1e-4, rtol=0)
    assert features[1:].abs().max() < 1e-4


def test_the_filters_together_amplify_no_frequency() -> None:
    """Features of two images therefore differ no more than the images do."""
    power = SCATTERING._low**2
    for wavelets in SCATTERING._wavelets:
        # A real image has the same power at both signs of a frequency.
        turned = torch.flip(wavelets, (-2, -1)).roll((1, 1), (-2, -1))
        power = power + (wavelets**2 + turned**2).sum(0) / 2
    assert power.max() < 1.05


def test_a_quarter_turn_of_the_image_turns_the_angles() -> None:
    plain = SCATTERING(IMAGES)[:, 1:17].unflatten(1, (2, 8))
    turned = SCATTERING(torch.rot90(IMAGES, 1, (-2, -1)))[:, 1:17].unflatten(1, (2, 8))
    back = torch.rot90(turned.roll(4, dims=2), -1, (-2, -1))
    # The places of the features are not symmetric in the image, so only the means agree.
    torch.testing.assert_close(plain.mean((-2, -1)), back.mean((-2, -1)), rtol=0.15, atol=0.01)


def test_a_wave_answers_at_its_own_angle_and_scale() -> None:
    place = torch.arange(16.0)
    wave = torch.cos(0.75 * torch.pi * place)[:, None].expand(16, 16)[None, None]
    first = SCATTERING(wave)[0, 1:17, 1:3, 1:3].mean((-2, -1)).view(2, 8)
    assert int(first.argmax()) == 0  # scale 0, along the first axis
    assert first[0, 0] > 3 * first[0, 4]


def test_channels_are_transformed_apart() -> None:
    pairs = torch.cat([IMAGES[:2], IMAGES[2:]], dim=1)
    torch.testing.assert_close(SCATTERING(pairs)[:, :81], SCATTERING(IMAGES[:2]))
    torch.testing.assert_close(SCATTERING(pairs)[:, 81:], SCATTERING(IMAGES[2:]))


def test_an_example_is_normalised_by_itself_alone() -> None:
    features = SCATTERING(IMAGES)
    together, alone = normalise_groups(features, 27), normalise_groups(features[:1], 27)
    torch.testing.assert_close(together[:1], alone)
    assert float(together.unflatten(1, (27, 3)).mean((2, 3, 4)).abs().max()) == pytest.approx(
        0, abs=1e-4
    )
