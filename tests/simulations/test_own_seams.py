"""A correlation and an audit from outside the library, registered and named by reference."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import simulations
from fedlgm.errors import ConfigError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm_lab import audits
from fedlgm_lab.audits import Audit, Subject
from simulations.cli import app
from simulations.config import recipe as recipes

CYCLE = [
    "federation.sampling=cyclic",
    "federation.rate=0.25",
    "federation.clients=16",
    "federation.rounds=4",
    "privacy.delta=0.01",
]
MODULE = """
import numpy as np
from fedlgm_lab.audits.audit import reported_of
from fedlgm.noise.correlation import Correlation

def halves(rounds, *, bands=2, min_separation=1):
    column = 0.5 ** np.arange(min(bands, rounds))
    return Correlation("halves", rounds, column / np.linalg.norm(column))

def suspicious(subject, settings, progress):
    reported = reported_of(subject, subject.method.plan(subject.start))
    return reported.audited(settings.method, 1e6, settings.confidence, {}, 1)

def wrong(*arguments, **options):
    return 3
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "outside_seams.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "outside_seams"
    sys.modules.pop("outside_seams", None)


def halves(rounds: int, *, bands: int = 2) -> Correlation:
    column = 0.5 ** np.arange(min(bands, rounds))
    return Correlation("halves", rounds, column / np.linalg.norm(column))


def test_a_correlation_of_ones_own_is_a_recipes_noise_by_name_by_reference_and_as_an_object(
    outside, tmp_path
):
    correlation.register("halves", halves)
    runs = {
        name: simulations.simulate(overrides=CYCLE, noise=noise, run_dir=tmp_path / name)
        for name, noise in (
            ("name", "halves"), ("reference", f"{outside}:halves"), ("object", halves(4, bands=4)),
        )
    }  # fmt: skip
    assert len({run["model_sha256"] for run in runs.values()}) == 1
    assert len({run.epsilon for run in runs.values()}) == 1
    assert all(run.guarantee.startswith("proven") for run in runs.values())
    again = simulations.resume(tmp_path / "reference")
    assert again["model_sha256"] == runs["name"]["model_sha256"]


@pytest.mark.parametrize(
    ("noise", "more", "message"),
    [
        ("halvs", [], "privacy.noise: must be 'independent', 'banded'"),
        ("outside_seams:halve", [], "did you mean 'halves'"),
        (
            "outside_seams:halves",
            ["privacy.buffers=2"],
            "privacy.buffers is for privacy.noise = 'blt'",
        ),
        ("outside_seams:wrong", [], "must return a Correlation for 4 rounds, got 3"),
    ],
)
def test_a_correlation_that_is_none_is_refused(noise, more, message, outside):
    with pytest.raises(ConfigError) as refused:
        recipes.load("digits", [*CYCLE, f"privacy.noise={noise}", *more]).noise  # noqa: B018
    assert message in str(refused.value)


def test_a_name_is_registered_once():
    with pytest.raises(ConfigError, match="there is a correlation 'banded' already"):
        correlation.register("banded", halves)
    with pytest.raises(ConfigError, match="there is an audit method 'probe' already"):
        audits.register("probe", lambda *given: None)


def test_an_audit_of_ones_own_decides_beside_the_checks(outside, tmp_path):
    found = Audit(method=f"{outside}:suspicious").mechanism(Subject.of("uniform", rounds=2))
    assert (found.method, found.epsilon_lower, found.passed) == (
        f"{outside}:suspicious",
        1e6,
        False,
    )
    assert found.checks  # those that every method makes
    ran = CliRunner().invoke(
        app, ["audit", "uniform", "--method", f"{outside}:suspicious", "--rounds", "2", "--json"]
    )
    assert ran.exit_code == 1
    assert json.loads(ran.stdout[ran.stdout.index("{") :])["method"] == f"{outside}:suspicious"
    assert not list(Path().glob("audit*.png"))
    with pytest.raises(ConfigError, match="must return an AuditResult, got 3"):
        Audit(method=f"{outside}:wrong").mechanism(Subject.of("uniform", rounds=2))
    with pytest.raises(ConfigError, match="unknown audit method 'prob'; did you mean 'probe'"):
        Audit(method="prob")
    with pytest.raises(
        ConfigError, match="audit method '<print>' is an object: register it and pass its name"
    ):
        Audit(method=print)  # type: ignore[arg-type]


class Network(torch.nn.Module):
    """The network inside, and steps and optimizers that fedlgm does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        raise AssertionError("fedlgm trains")

    configure_optimizers = training_step


def of_lightning() -> torch.nn.Module:
    lightning = pytest.importorskip("lightning", reason="Lightning is no dependency")
    return type("Lit", (Network, lightning.LightningModule), {})()


def of_accelerate(precision: str = "no") -> torch.nn.Module:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # a process has one precision
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    return accelerator.unwrap_model(accelerator.prepare(Network()), keep_fp32_wrapper=False)


@pytest.mark.parametrize(
    "make",
    [Network, of_lightning, of_accelerate, lambda: of_accelerate("bf16")],
    ids=["own", "lightning", "fp32", "bf16"],
)
def test_a_module_of_lightning_or_accelerate_is_a_model(make, tmp_path):
    x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
    data = {"train": (x, np.arange(60) % 2), "test": (x, np.arange(60) % 2)}
    changes = {
        "federation.clients": 6,
        "federation.rounds": 1,
        "privacy.delta": 0.01,
        "privacy.accountant": "rdp",
    }
    result = simulations.simulate(
        model=make(), data=data, overrides=changes, run_dir=tmp_path / "run"
    )
    assert result.epsilon <= 8
