"""Clients vote between two cuts of their updates: what they answer, what it costs, and that the
majority decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import simulations
from clients import ClientData
from clients.cut_vote import CutVotes
from clients.updates import LocalWork
from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.client_release import Asked, client_release
from fedlgm.aggregation.contributions import AnsweredUpdates
from fedlgm.aggregation.device_sum import DeviceSum
from fedlgm.errors import ConfigError
from fedlgm.extension.testing import check_mechanism
from fedlgm.planning.facts import LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import CutVote
from fedlgm.planning.transcript import Transcript
from fedlgm.training.tasks import Classification
from fedlgm_lab.audits.subject import Subject
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.work import Work
from tests.support.nodes import edit, make_node

FACTS = RunFacts(1.5, Sampling("poisson", 100, 0.1))
DATA = ClientData(
    torch.ones(300, 1), torch.zeros(300, dtype=torch.int64)
)  # more than one batch of losses
START = torch.tensor([1.0, 0.0, 0.0])
WIDE = [99.0, 1.0, 0.0]  # only the second layer, which is small beside the first, lowers the loss


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))


def first_plan(**options: float) -> ReleasePlan:
    mechanism = mechanisms.get("voted-filling", **options)
    return mechanism.plan(
        mechanism.table(LayerTable.from_module(model())), FACTS, Transcript.start(START)
    )


def votes(*updates: list[float]) -> list[float]:
    plan, module = first_plan(), model()
    made = CutVotes(module, plan.layers, Classification()).add_votes(
        torch.tensor(updates), plan, START, [DATA] * len(updates)
    )
    return made.answers["cut-vote"][:, 0].tolist()


def later(vote: float) -> list[ReleasePlan]:
    """The plans of the second and the third round."""
    mechanism, first = mechanisms.get("voted-filling"), first_plan()
    transcript = Transcript.start(START).extend(START, torch.tensor([0.5, 0.0, 0.0, vote]), first)
    second = mechanism.plan(first.layers, FACTS, transcript)
    return [
        second,
        mechanism.plan(
            first.layers, FACTS, transcript.extend(START, torch.zeros(second.size), second)
        ),
    ]


def test_it_is_a_mechanism():
    check_mechanism(mechanisms.get("voted-filling"))
    check_mechanism(mechanisms.get("voted-filling", share=0.1, bound=2.0))


def test_a_client_prefers_the_cut_with_the_lower_loss():
    harmful = [99.0, 0.0, 1.0]  # filling keeps more of the layer that raises the loss
    within, broken = [0.1, 0.5, 0.0], [99.0, float("nan"), 0.0]
    assert votes(WIDE, harmful, within, broken, WIDE) == [0.5, -0.5, 0.0, 0.0, 0.5]


def test_every_round_costs_one_release():
    first = first_plan(share=0.3)
    assert [plan.effective_multiplier for plan in (first, *later(0.4))] == pytest.approx([1.5] * 3)
    assert (0.5 / first.queries[0].sigma) ** 2 == pytest.approx(0.3 / 1.5**2)


@pytest.mark.parametrize(("vote", "filling"), [(0.3, True), (-0.3, False), (0.0, False)])
def test_the_majority_decides_all_later_rounds(vote, filling):
    assert [bool(plan.fills) for plan in later(vote)] == [filling] * 2
    assert not any(plan.queries for plan in later(vote))


def test_a_void_round_decides_nothing():
    mechanism, first = mechanisms.get("voted-filling"), first_plan()
    void = Transcript.start(START).extend(START, torch.zeros(first.size), first)
    again = mechanism.plan(first.layers, FACTS, void)
    assert again.equals(first)
    third = mechanism.plan(
        first.layers, FACTS, void.extend(START, torch.tensor([0.5, 0.0, 0.0, 0.4]), again)
    )
    assert (bool(third.fills), third.queries) == (True, ())


def test_a_model_of_one_layer_has_no_vote():
    mechanism = mechanisms.get("voted-filling")
    layers = mechanism.table(LayerTable.from_sizes({"only": 3}))
    plan = mechanism.plan(layers, FACTS, Transcript.start(torch.zeros(3)))
    assert (plan.queries, plan.fills, plan.sigma.tolist()) == ((), (), [1.5])


@pytest.mark.parametrize("answer", [0.5, 40.0, -1e30, float("nan"), float("inf")])
def test_no_answer_moves_the_sum_by_more_than_its_bound(answer):
    plan = first_plan()
    updates = AnsweredUpdates(torch.tensor([WIDE]), {"cut-vote": torch.tensor([[answer]])})
    for total in (BoundedSum.empty(plan), DeviceSum(plan, torch.device("cpu"), "torch")):
        total.add(updates)
        assert abs(float(total.total[-1])) <= 0.5
        assert float(total.total[:-1].norm()) == pytest.approx(1.0, rel=1e-4)


def test_an_audit_moves_the_vote_as_far_as_a_client_can():
    subject = Subject.of("voted-filling")
    moved = [
        np.linalg.norm((one.total - other.total).numpy() / one.plan.scales)
        * one.plan.effective_multiplier
        for one, other in subject.neighbours(subject.start)
    ]
    assert max(moved) == pytest.approx(1.0, abs=1e-4)
    assert max(moved) <= 1


def test_answers_of_another_shape_are_refused():
    updates = AnsweredUpdates(torch.tensor([WIDE]), {"cut-vote": torch.zeros(1, 2)})
    with pytest.raises(ConfigError, match=r"'cut-vote' encodes \(1, 2\)"):
        BoundedSum.empty(first_plan()).add(updates)


def test_clients_without_an_answer_abstain():
    total = BoundedSum.empty(first_plan())
    total.add(torch.tensor([WIDE]))
    assert float(total.total[-1]) == 0.0
    assert CutVote((3,)).decode(torch.zeros(1)).tolist() == [0.5]


WIDE_NETWORK = [
    "model.hidden=[8, 256, 8]",
    "training.optimizer=adam",
    "training.lr=0.01",
    "training.epochs=5",
]


def vote_of_a_run(*changes: str) -> tuple[float, float]:
    """The released vote of a run of two rounds, and its epsilon."""
    common = [
        "mechanism.name=voted-filling",
        "federation.rounds=2",
        "run.evaluate_every=2",
        "privacy.epsilon=20",
        "privacy.accountant=rdp",
    ]
    result = simulations.simulate("digits", overrides=[*common, *changes], engine="local")
    assert "queries" not in result.history[2]
    return result.history[1]["queries"]["cut-vote"][0], result.epsilon


def test_clients_of_a_run_vote_as_their_model_needs():
    (wide, epsilon), (sgd, _) = (
        vote_of_a_run(*WIDE_NETWORK),
        vote_of_a_run("model.hidden=[8, 256, 8]"),
    )
    assert wide > 0.8
    assert sgd < 0.7
    assert epsilon <= 20


@pytest.mark.parametrize(
    ("recipe", "changes", "sentence"),
    [
        ("correlated-digits", [], "only the first round has a vote"),
        ("digits", ["privacy.unit=user", "federation.users=100"], "a user's clients may disagree"),
    ],
)
def test_runs_without_a_vote_are_refused_before_they_start(recipe, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        simulations.simulate(
            recipe, overrides=["mechanism.name=voted-filling", *changes], engine="local"
        )


def test_clients_that_cannot_vote_are_refused_before_they_train():
    def source(client: int) -> ClientData:
        return pytest.fail("trained")

    plan = first_plan()
    work = LocalWork(object(), LocalTraining(), source)  # type: ignore[arg-type]
    contributions = work.contributions()
    with pytest.raises(
        ConfigError,
        match="'cut-vote' is answered from a client's data, but these clients have no such answer",
    ):
        client_release(contributions, object(), Asked(plan, START, 1, [0]))  # type: ignore[arg-type]


class OnlyInTraining(nn.Sequential):
    """A model of an operator's own that fails in evaluation."""

    def __init__(self, in_shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.training
        return super().forward(x)


def test_a_node_tries_what_a_vote_needs_before_it_charges(tmp_path):
    node = make_node(tmp_path / "node")
    name, first = "tests.clients.test_cut_vote:OnlyInTraining", 'models = ["'
    edit(node, first, f'{first}{name}", "')
    edit(node, 'mechanisms = ["', 'mechanisms = ["voted-filling", "')
    policy = node.policy()
    data = node_data.read(policy.data, node.path)
    releaser = Releaser(policy, data, node_data.digest(data), bytes(32))
    mechanism, module = mechanisms.get("voted-filling"), OnlyInTraining((1, 4, 4), 3)
    layers = mechanism.table(LayerTable.from_module(module))
    facts = RunFacts(4.0, Sampling("poisson", 3, 1.0), "replace-one", "local", rounds=2)
    start = Transcript.start(layers.flatten(module))
    plan = mechanism.plan(layers, facts, start)
    work = Work.parse({"mechanism": {"name": "voted-filling"}, "model": {"name": name}}, policy)
    later = mechanism.plan(
        layers, facts, start.extend(start.models[-1], torch.ones(layers.size + 1), plan)
    )
    releaser.prepare(releaser.understand(2, later.to_json(), work, start.models[-1].numpy()))
    with pytest.raises(Refusal, match="training fails on any data"):
        releaser.prepare(releaser.understand(1, plan.to_json(), work, start.models[-1].numpy()))
