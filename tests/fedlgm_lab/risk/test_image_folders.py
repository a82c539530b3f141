"""The recipe of CelebA and FFHQ on small folders of the same kind: risk on one, training on the
other."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedlgm.data import images
from fedlgm_lab.risk.measure import risk_of
from simulations import launch
from simulations.config import recipe as recipes


def faces(folder, count, seed):
    """Images whose brightness says the attribute."""
    rng, rows = np.random.default_rng(seed), []
    folder.mkdir()
    for i in range(count):
        bright = int(rng.integers(2))
        pixels = rng.integers(0, 100, (20, 16, 3)) + 120 * bright
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:06}.png")
        rows.append((f"{i:06}.png", bright))
    return rows


@pytest.mark.slow
def test_celeba_and_ffhq(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    images._load_resized.cache_clear()
    rows = faces(tmp_path / "celeba", 60, 1)
    lines = [f"{name} {2 * bright - 1}" for name, bright in rows]
    (tmp_path / "celeba" / "list_attr_celeba.txt").write_text("\n".join(["60", "Smiling", *lines]))
    rows = faces(tmp_path / "ffhq", 50, 2)
    (tmp_path / "ffhq" / "labels.csv").write_text(
        "\n".join(["file,gender", *(f"{name},{b}" for name, b in rows)])
    )
    changes = [
        f"data.dir={tmp_path / 'celeba'}",
        f"risk.dir={tmp_path / 'ffhq'}",
        "data.image_size=16",
        "data.train_images=48",
        "model.name=cnn-small",
        "risk.epochs=2",
        "risk.adversary_epochs=2",
        "risk.examples=45",
        "training.batch_size=12",
        "training.lr=0.5",
        "federation.rounds=25",
        "run.evaluate_every=25",
        "run.seed=3",
        "privacy.epsilon=50",
    ]
    recipe = recipes.load("lm-dp-sgd-celeba", changes)
    found = risk_of(recipe)
    assert [risk.layer for risk in found.risks] == ["conv1", "conv2", "fc1", "fc2"]
    assert (found.examples, "image-folder" in found.public) == (
        40,
        True,
    )  # every fifth of 50 is a test image
    rates = f"mechanism.error_rates={found.rates('training')}"
    result = launch.simulate(
        recipes.load("lm-dp-sgd-celeba", [*changes, rates]), run_dir=tmp_path / "run"
    )
    assert result["accuracy"] > 0.8
    assert result["unit"] == "example"
    assert result["epsilon"] <= 50
