"""Inception distances: where the weights are at hand, and what is said where they are not."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.frechet import frechet_distance
from fedlgm_lab.attacks.inception import WEIGHTS, InceptionFeatures

installed = pytest.mark.skipif(
    importlib.util.find_spec("torch_fidelity") is None, reason="torch-fidelity is not installed"
)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of the published form; its numbers are random, since the real ones cannot be had
    everywhere."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Untrained(FeatureExtractorInceptionV3):
        def load_state_dict(self, *_):
            return None

    folder = tmp_path_factory.mktemp("weights")
    torch.save({}, folder / "empty.pth")
    torch.manual_seed(0)
    network = Untrained(
        "inception", ["2048"], feature_extractor_weights_path=str(folder / "empty.pth")
    )
    torch.save(network.state_dict(), folder / WEIGHTS)
    return folder / WEIGHTS


@pytest.mark.slow
@installed
def test_distances_by_torch_fidelitys_network(weights):
    inception = InceptionFeatures(weights)
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = inception.features(images)
    assert found.shape == (6, 2048)
    assert found.dtype == np.float64
    assert inception.distance(images[:3], images[3:]) == pytest.approx(
        frechet_distance(found[:3], found[3:])
    )
    assert np.allclose(found[:2], inception.features(images[:2].expand(-1, 3, -1, -1)))
    with pytest.raises(ConfigError, match="1 or 3"):
        inception.features(torch.zeros(2, 2, 8, 8))


@installed
def test_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    with pytest.raises(
        ConfigError, match=f"no Inception weights at .*{WEIGHTS}: fedlgm does not download them"
    ):
        InceptionFeatures()
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ConfigError, match="no Inception weights at"):
        InceptionFeatures(tmp_path / "elsewhere.pth")


@installed
def test_other_files_are_refused_and_not_executed(tmp_path):
    marker = tmp_path / "marker"

    class Hostile:
        def __reduce__(self):
            return (marker.write_text, ("executed",))

    torch.save({"fc.weight": Hostile()}, tmp_path / "hostile.pth")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    (tmp_path / "text.pth").write_text("not weights")
    for name in ("hostile.pth", "other.pth", "text.pth"):
        with pytest.raises(
            ConfigError, match=f"{name} does not hold torch-fidelity's Inception weights"
        ):
            InceptionFeatures(tmp_path / name)
    assert not marker.exists()


def test_without_the_package_the_message_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    monkeypatch.setitem(sys.modules, "torch_fidelity.feature_extractor_inceptionv3", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedlgm\[inception\]'"):
        InceptionFeatures(tmp_path / WEIGHTS)
