"""The class reconstruction on whole federations: it has power, and noise takes it away."""

from __future__ import annotations

import pytest

from fedlgm_lab.attacks.gan import GanSettings
from fedlgm_lab.attacks.runs import gan
from fedlgm_lab.attacks.runs.target import Target

LABEL = 3
FEDERATION = (
    f"data.private_class={LABEL}",
    "data.partition=isolation",
    "federation.clients=8",
    "federation.rate=1.0",
    "federation.rounds=15",
    "run.evaluate_every=15",
    "model.hidden=[64]",
    "training.lr=0.3",
    "privacy.accountant=rdp",
)


def reconstructed(*overrides: str) -> gan.ClassFinding:
    target = Target.open("digits", [*FEDERATION, *overrides])
    return gan.attack(target, label=LABEL, settings=GanSettings())


@pytest.mark.slow
def test_the_isolated_class_is_reconstructed_and_noise_hides_it():
    bare = reconstructed("mechanism.name=none")
    noised = reconstructed("mechanism.name=snr-consistent", "privacy.epsilon=1.0")
    little = reconstructed("mechanism.name=snr-consistent", "privacy.epsilon=3000.0")
    # Without protection the reconstruction is closer to the class than any other digit, and taken
    # for it.
    assert bare.distance < bare.nearest_class / 2
    assert bare.agreement > 0.7
    # With the noise of a small budget it is no better than showing another digit.
    assert noised.distance > 2 * bare.distance
    assert noised.distance > 0.75 * noised.nearest_class
    assert noised.agreement < 0.5
    # Noise that is next to none hides little; two trainings of the generator differ by more than it
    # moves the models.
    assert little.distance < noised.distance / 2
