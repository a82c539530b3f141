"""Seeded runs give the models and ledgers that they gave before: a change of structure changes no
bit.

The digests were recorded with AVX-512 on a processor of AMD. Other instruction sets and kernels add
up in another order, so the digests are not compared there.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedlgm
import simulations
from clients.source import ClientData
from fedlgm import data
from fedlgm.errors import DataError
from fedlgm.noise.correlation import Correlation
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import native
from fedlgm.training.stack import tape
from fedlgm_nodes.protocol import messages as node_protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.service.release import Releaser, Request
from fedlgm_nodes.service.work import Work
from strategies import PrivateFedAvg
from tests.support.nodes import make_node

FEW = ["federation.rounds=1", "federation.clients=50", "federation.rate=0.1", "training.epochs=1"]
RUNS = {
    "independent noise": ("digits", ["federation.rounds=3"], "d255e2977f7d455b", "3:628586c0"),
    "correlated noise": (
        "correlated-digits",
        ["federation.rounds=6"],
        "f6bd102bcee5ae2e",
        "6:6e17998f",
    ),
    "clients add the noise": (
        "digits",
        ["federation.rounds=3", "privacy.trust=local", "privacy.max_participations=3"],
        "104520b82070fe9b",
        "143:afa5ff74",
    ),
    "turns": (
        "digits",
        ["federation.rounds=6", "federation.sampling=cyclic"],
        "90dc195dae3a1967",
        "6:9281c299",
    ),
    "the recipe of nodes": (
        "nodes",
        ["federation.rounds=2", "run.seed=1", "run.test_mode=true"],
        "d12b7a6d458d423b",
        "6:2485bffc",
    ),
    "weights by risk": (
        "lm-dp-sgd-digits",
        ["federation.rounds=2"],
        "fdb4c98ef823f01f",
        "2:edd0147c",
    ),
    "one party's examples": (
        "dp-sgd-digits",
        ["federation.rounds=3"],
        "f240941e9b8463f7",
        "3:34f0bfe4",
    ),
    "a published variant": (
        "digits",
        [
            "federation.rounds=2",
            "mechanism.name=uniform",
            "mechanism.variant=published",
            "mechanism.clip=med",
        ],
        "b57f740077c92779",
        "2:42612d0f",
    ),
    "clients' examples, PyTorch": (
        "example-level-federation",
        ["federation.rounds=2", "training.kernel=torch"],
        "d855420c4ae50a22",
        "26:66467cd3",
    ),
    "clients' examples, the compiled kernel": (
        "example-level-federation",
        ["federation.rounds=2"],
        "a139b0715244d7a0",
        "26:65a0e013",
    ),
    "images, PyTorch": (
        "fashion-mnist-short",
        [*FEW, "training.kernel=torch"],
        "0bfa7f986ded1e0f",
        "1:b6b36c39",
    ),
    "images, the compiled kernel": ("fashion-mnist-short", FEW, "2301ef90bd01863c", "1:605197e5"),
}
SLOW = {
    "weights by risk",
    *(run for run in RUNS if run.startswith(("clients' examples", "images"))),
}


def recorded_here() -> bool:
    """Whether this machine is of the kind that the digests were recorded on."""
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return tape._is_of_amd() and avx512 and "MKL_CBWR" not in os.environ


@pytest.mark.skipif(
    not recorded_here(), reason="the digests were recorded with AVX-512 on a processor of AMD"
)
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[pytest.mark.slow] if run in SLOW else []) for run in RUNS]
)
def test_a_seeded_run_gives_the_model_and_the_ledger_that_it_gave(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All products by MKL, as when the digests were recorded: oneDNN's depend on the caches' sizes.
    monkeypatch.setattr(tape, "_is_of_amd", lambda: False)
    recipe, overrides, model, head = RUNS[run]
    if run.endswith("the compiled kernel") and native.reason() is not None:
        pytest.skip("the recorded run has the compiled kernel")
    if run.startswith("images"):
        try:
            data.load("fashion-mnist", download=False)
        except DataError as missing:
            pytest.skip(str(missing))
    result = simulations.simulate(recipe, overrides=overrides, run_dir=tmp_path / "run")
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        rows, digest = ledger.head()
    assert (result["model_sha256"][:16], f"{rows}:{digest[:8]}") == (model, head)


LAYERS = LayerTable.from_sizes({"a": 4, "b": 1})


def plan(facts: RunFacts, **options: Any) -> ReleasePlan:
    return ReleasePlan(
        LAYERS, [3.0, 4.0], [5.0, 5.0], facts, Guarantee("proven", "an example"), **options
    )


@pytest.mark.parametrize(
    ("made", "more"),
    [
        (plan(RunFacts(1.0, Sampling("poisson", 100, 0.1))), {}),
        (
            plan(
                RunFacts(
                    1.0, Sampling("poisson", 20, 0.5), trust="local", steps=LocalSteps(5, 0.1, 32.0)
                ),
                bounded_by="trainer",
            ),
            {"steps": {"count": 5, "rate": 0.1, "batch": 32.0}},
        ),
    ],
)
def test_the_text_of_a_plan_stays(made: ReleasePlan, more: dict[str, object]) -> None:
    """Clients' noise is keyed by it: also the order of its keys and the absence of what a run does
    not have."""
    facts = json.loads(made.to_json())["facts"]
    assert list(facts)[: len(FACTS)] == FACTS
    assert {name: facts[name] for name in list(facts)[len(FACTS) :]} == more
    assert list(facts["training"]) == [
        "optimizer",
        "lr",
        "momentum",
        "epochs",
        "batch_size",
        "gradient_clip",
    ]
    assert list(facts["sampling"]) == ["scheme", "population", "rate"]


@pytest.mark.parametrize(
    ("facts", "options", "text"),
    [
        (RunFacts(1.0, Sampling("poisson", 100, 0.1)), {}, "829e370b8a9ee559"),
        (
            RunFacts(
                1.0, Sampling("poisson", 20, 0.5), trust="local", steps=LocalSteps(5, 0.1, 32.0)
            ),
            {"bounded_by": "trainer"},
            "82f3a2d9b8695df5",
        ),
        (
            RunFacts(
                1.0,
                Sampling("cyclic", 20, 0.25, 4),
                rounds=8,
                noise=Correlation(
                    "banded", 8, np.array([0.8, 0.6])
                ),  # optimised ones depend on the processor
            ),
            {"position": 1},
            "3670fa16698c4197",
        ),
        (
            RunFacts(1.0, Sampling("fixed", 20, 0.5), "replace-one", "local", max_participations=2),
            {},
            "952ba1ac645cf059",
        ),
    ],
)
def test_every_byte_of_a_plan_stays(facts: RunFacts, options: dict[str, Any], text: str) -> None:
    assert hashlib.sha256(plan(facts, **options).to_json().encode()).hexdigest()[:16] == text


@pytest.mark.skipif(
    not recorded_here(), reason="a calibrated multiplier's last digits depend on the processor"
)
def test_the_owner_of_a_flower_apps_ledger_stays(tmp_path: Path) -> None:
    """Else an app that continues is refused its own ledger."""
    model = torch.nn.Linear(3, 2)
    PrivateFedAvg(
        model, epsilon=8.0, delta=1e-3, clients=20, rounds=4, ledger=tmp_path / "ledger.sqlite"
    )

    owner = "5fc11c8e9603d826c3e0fa64723abe3e64d6a7acc534eab36bdf2e40a82bf959"
    Ledger(tmp_path / "ledger.sqlite", owner).close()  # another one is refused


def test_the_names_of_a_question_and_of_a_nodes_release_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node answers a question of equal name with equal noise."""
    made = plan(RunFacts(1.0, Sampling("poisson", 20, 0.5), "replace-one", "local")).to_json()
    model = np.zeros(5, dtype=np.float32)
    work: dict[str, Any] = {"mechanism": {"name": "gaussian"}, "model": {"name": "logistic"}}
    question = Question(
        "run", 1, 0, made, node_protocol.sha256(model.data), work, "nonce", "service"
    )
    assert question.digest[:16] == "c0366917cfa66520"  # holds the number of the protocol
    monkeypatch.setattr(fedlgm, "__version__", "a version")
    monkeypatch.setattr(torch, "__version__", "another version")
    policy = make_node(tmp_path / "node").policy()
    releaser = Releaser(
        policy,
        ClientData(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)),
        "a digest",
        b"0" * 32,
    )
    request = Request(
        1, ReleasePlan.from_json(LAYERS, made), made, model, Work.model_validate(work)
    )
    assert releaser.name(request, "run")[:16] == "acab9684134ad31f"


FACTS = [
    "noise_multiplier", "sampling", "relation", "trust", "rounds", "epsilon", "delta", "accountant",
    "max_participations", "training",
]  # fmt: skip
