"""LaDP-FL in whole runs: rounds without a release, frozen layers, what is logged, who may take
part."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict

from clients import AnyClient
from fedlgm import wire
from fedlgm.errors import PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy import Ledger
from simulations import launch
from simulations.config import recipe
from simulations.config.assembly import Assembly
from simulations.engines.local import LocalGrid
from simulations.runs.checkpoints import model_digest
from simulations.runs.folder import RunFolder

SMALL = [
    "federation.clients=20",
    "federation.rounds=4",
    "federation.rate=0.5",
    "federation.server_optimizer=sgd",
    "federation.server_lr=1.0",
    "training.epochs=2",
    "training.lr=0.1",
    "training.gradient_clip=20.0",
    "model.hidden=[4]",
    "mechanism.name=ladp",
]
IN_THE_FRAME = [
    *SMALL,
    "mechanism.variant=published",
    "mechanism.score_cap=1e-6",
    "privacy.epsilon=0.2",
    "privacy.delta=0.02",
    "privacy.trust=local",
]


def simulate(tmp_path: Path, *overrides: str) -> tuple[dict, list[dict]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # delta = 0.02 is the paper's, and too large
        parsed = recipe.load("digits", overrides)
    result = launch.simulate(parsed, run_dir=tmp_path / "run")
    return result, RunFolder.open(tmp_path / "run").rows(private=True)


def test_a_run_that_selects_nothing_releases_nothing(tmp_path: Path) -> None:
    result, rows = simulate(tmp_path, *SMALL, "mechanism.threshold=1000.0")
    assert all(row["skipped"] and row["released"] == 0 and row["noise_scale"] == 0 for row in rows)
    assert result["epsilon"] == 0
    assert "nothing is released" in result["guarantee"]
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert list(ledger.charges()) == []
    initial = Assembly(recipe.load(tmp_path / "run" / "recipe.toml")).model.initial()
    assert result["model_sha256"] == model_digest(initial)


def test_a_skipped_round_uses_up_no_participation(tmp_path: Path) -> None:
    local = [
        "privacy.trust=local",
        "privacy.max_participations=2",
        "privacy.epsilon=50.0",
        "mechanism.threshold=1000.0",
    ]
    simulate(tmp_path, *SMALL, *local)
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert ledger.participations() == {}


def test_a_frozen_layer_never_moves(tmp_path: Path) -> None:
    _, rows = simulate(tmp_path, *SMALL, "mechanism.threshold=2.0")
    assembly = Assembly(recipe.load(tmp_path / "run" / "recipe.toml"))
    start = assembly.model.initial()
    end = (
        RunFolder.open(tmp_path / "run")
        .checkpoints.latest(assembly.model.layers)
        .transcript.models[-1]
    )
    kept = assembly.model.layers.norms(start).numpy() < 2.0
    moved = assembly.model.layers.norms(end - start).numpy()
    assert kept.any()
    assert (moved[kept] == 0).all()
    assert (moved[~kept] > 0).all()
    assert rows[-1]["sigma"][int(np.flatnonzero(kept)[0])] is None


def test_the_published_run_logs_every_clients_noise(tmp_path: Path) -> None:
    result, rows = simulate(
        tmp_path, *IN_THE_FRAME, "privacy.max_participations=4", "mechanism.threshold=1.5"
    )
    assert result["epsilon"] == math.inf
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        most = max(ledger.participations().values())
    assert result["claimed_epsilon"] == pytest.approx(
        0.1 * 0.2 * most
    )  # q T epsilon over a client's participations
    for row in rows:
        clients = row["clients"]
        assert set(clients) == {"score", "sigma", "selected", "noise_norm"}
        assert len(clients["sigma"]) == row["cohort"]
        squares = sum(norm**2 for client in clients["noise_norm"] for norm in client)
        assert row["noise_scale"] == pytest.approx(math.sqrt(squares) / 10, rel=1e-3)


def test_the_participation_cap_holds(tmp_path: Path) -> None:
    local = ["privacy.trust=local", "privacy.max_participations=1", "privacy.epsilon=50.0"]
    simulate(tmp_path, *SMALL, *local)
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        assert max(ledger.participations().values()) == 1
        assert ledger.epsilon(1e-5) <= 50.0


def test_a_client_refuses_more_than_it_agreed_to() -> None:
    local = ["privacy.trust=local", "privacy.max_participations=2", "privacy.epsilon=50.0"]
    assembly = Assembly(recipe.load("digits", [*SMALL, *local]))
    grid = LocalGrid.of(assembly.client(KeyRing.from_seed(0), AnyClient()))
    plan = assembly.privacy.method.plan(assembly.privacy.start())
    model = ArrayRecord({wire.MODEL: Array(assembly.model.initial().numpy())})

    def ask(round_: int) -> None:
        values = {wire.ROUND: round_, wire.CLIENTS: [3], wire.PLAN: plan.to_json()}
        content = RecordDict({wire.ARRAYS: model, wire.CONFIG: ConfigRecord(values)})
        list(
            grid.send_and_receive([grid.create_message(content, MessageType.TRAIN, 2, str(round_))])
        )

    for round_ in (1, 2, 2):  # a repeated round is the same release
        ask(round_)
    with pytest.raises(PrivacyError, match="agreed"):
        ask(3)
