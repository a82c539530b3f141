"""Releases that protect single examples: a policy allows them, and the node noises and accounts for
every step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlgm import mechanisms, privacy
from fedlgm.errors import LedgerError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import accountants
from fedlgm.privacy.past import FEW
from fedlgm.training import models
from fedlgm.training.example_level.trainer import Examples, ExampleTrainer, digest_of, local_steps
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.ask import Ask
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.row import EXAMPLE
from fedlgm_nodes.service.service import Service
from fedlgm_nodes.service.units import NodeExamples
from fedlgm_nodes.service.work import Work
from tests.fedlgm_nodes.service.test_service_hostile_questions import fussy
from tests.support import nodes
from tests.support.nodes import ask, edit, hello, make_node, rows, served

STEPS, BATCH, LR = 4, 6.0, 0.1
WORK = nodes.WORK | {"mechanism": {"name": "dp-sgd"}}
MODULE = models.build("logistic", in_shape=nodes.SHAPE, classes=nodes.CLASSES)


def plan(
    multiplier: float = 4.0,
    count: int = STEPS,
    rate: float = 0.25,
    mechanism: str = "dp-sgd",
    trust: str = "local",
    assumes: str = "",
) -> ReleasePlan:
    steps = LocalSteps(count, rate, BATCH) if trust == "local" else None
    sampling = Sampling("poisson", 3, 1.0)
    facts = RunFacts(multiplier, sampling, "add-remove", trust, 10, steps=steps, assumes=assumes)  # type: ignore[arg-type]
    chosen = mechanisms.get(mechanism)
    layers = chosen.table(LayerTable.from_module(MODULE))
    return chosen.plan(layers, facts, Transcript.start(nodes.MODEL))


def node(path: Path) -> NodeFolder:
    return make_node(path, unit="example")


def test_every_step_is_noised_and_charged(tmp_path):
    """With noise far above the gradients the update is the sum of the steps' noise: lr sigma /
    batch sqrt(steps)."""
    quiet = node(tmp_path / "node")
    edit(
        quiet, "releases = 1000 #", "releases = 10_000_000 #"
    )  # else such noise would cost more than it is worth
    with served(quiet) as folder:
        loud = plan(50.0)
        drawn = []
        for round_ in range(1, 9):
            said, body = ask(folder, text=loud.to_json(), round=round_, work=WORK)
            assert said["ok"], said
            drawn.append(frames.vector(body, ("<f4", "<f8")))
        values = np.concatenate(drawn).astype(float)
        expected = LR * 50.0 / BATCH * np.sqrt(STEPS)
        assert np.std(values) == pytest.approx(expected, rel=4 / np.sqrt(2 * len(values)))
        assert abs(np.mean(values)) < 4 * expected / np.sqrt(len(values))
        kept = rows(folder)
        assert [(row.trust, row.protects) for row in kept] == [("local", EXAMPLE)] * 8
        event = privacy.events.repeat_event(privacy.events.gaussian_event(50.0, 0.25), STEPS)
        assert privacy.events.decode(json.loads(kept[0].event)) == event
        assert hello(folder)["unit"] == "example"
        spent = privacy.composed_epsilon([(event, 8)], 1e-5)
        assert hello(folder)["epsilon_spent"] == pytest.approx(spent, rel=1e-6)


def test_the_same_question_is_one_release(tmp_path):
    with served(node(tmp_path / "node")) as folder:
        text = plan().to_json()
        first, body = ask(folder, text=text, work=WORK)
        again, same = ask(folder, text=text, work=WORK, run="another")
        assert first["ok"]
        assert again["replayed"]
        assert body == same
        other, different = ask(folder, text=plan(4.001).to_json(), work=WORK)
        assert other["ok"]
        assert different != body
        assert len(rows(folder)) == 2


def test_the_budget_ends(tmp_path):
    with served(make_node(tmp_path / "node", unit="example", epsilon=1.0)) as folder:
        codes = []
        for round_ in range(1, 5):
            said, _ = ask(folder, text=plan(1.5, rate=0.5).to_json(), round=round_, work=WORK)
            codes.append(said.get("code", "ok"))
        assert "budget-spent" in codes
        assert hello(folder)["epsilon_spent"] <= 1.0


def changed(**values: object) -> str:
    return json.dumps(json.loads(plan().to_json()) | values)


def with_steps(**values: object) -> str:
    raw = json.loads(plan().to_json())
    raw["facts"]["steps"] |= values
    return json.dumps(raw)


REFUSED = {
    "noised by the server": (plan(trust="central").to_json(), WORK, "privacy"),
    "too many steps": (plan(count=20_000, rate=1e-4).to_json(), WORK, "work"),
    "too many passes": (plan(count=100, rate=0.5).to_json(), WORK, "work"),
    "a rate above 1": (with_steps(rate=1.5), WORK, "plan"),
    "no steps": (with_steps(count=0), WORK, "plan"),
    "fractions of steps": (with_steps(count=2.5), WORK, "plan"),
    "true steps": (with_steps(count=True), WORK, "plan"),
    "a batch without end": (with_steps(batch=float("inf")), WORK, "plan"),
    "no noise": (changed(sigma=[0.0]), WORK, "plan"),
    "too wide bounds": (changed(clip=[2.0], sigma=[8.0]), WORK, "privacy"),
    "a mechanism that bounds whole updates": (
        plan().to_json(),
        WORK | {"mechanism": {"name": "gaussian"}},
        "work",
    ),
    "Laplace noise": (changed(family="laplace"), WORK, "plan"),
}


def test_what_the_node_does_not_do_is_refused_and_costs_nothing(tmp_path):
    with served(node(tmp_path / "node")) as folder:
        found = {
            name: ask(folder, text=text, work=work)[0].get("code")
            for name, (text, work, _) in REFUSED.items()
        }
        assert found == {name: code for name, (_, _, code) in REFUSED.items()}
        assert rows(folder) == []


@pytest.mark.parametrize("by", ["the server", "the policy", "nobody"])
def test_sums_are_exact_if_either_side_says_so(tmp_path, by):
    folder = node(tmp_path / "node")
    if by == "the policy":
        edit(folder, "exact_sums = false", "exact_sums = true")
    data = node_data.read(folder.policy().data, folder.path)
    releaser = Releaser(folder.policy(), data, node_data.digest(data), b"0" * 32, test_seed=1)
    text, work = plan(1e-5).to_json(), WORK | ({"exact_sums": True} if by == "the server" else {})
    request = releaser.understand(1, text, Work.parse(work, folder.policy()), nodes.MODEL.numpy())
    found = releaser.make(request, releaser.name(request, "run"))
    keys = KeyRing.from_seed(1).derive(nodes.MODEL.numpy().tobytes(), text.encode())
    made = {}
    for exact in (True, False):
        mechanism = mechanisms.get("dp-sgd")
        module = models.build("logistic", in_shape=nodes.SHAPE, classes=nodes.CLASSES)
        table = mechanism.table(LayerTable.from_module(module))
        trainer = ExampleTrainer(module, table, mechanism, exact_sums=exact)
        clients = [Examples(folder.policy().node.client, data.x, data.y, digest_of(data.x, data.y))]
        ((update, _),) = local_steps(
            trainer, request.work.local(), nodes.MODEL, clients, request.plan, keys, 1
        )
        made[exact] = update.numpy()
    assert (found == made[by != "nobody"]).all()
    assert not (made[True] == made[False]).all()


def test_exact_sums_belong_to_examples(tmp_path):
    with served(node(tmp_path / "node")) as folder:
        said, _ = ask(folder, work=nodes.WORK | {"exact_sums": True})
        assert (said["code"], rows(folder)) == ("work", [])


def test_a_node_that_protects_its_whole_data_refuses(tmp_path):
    with served(make_node(tmp_path / "node", mechanisms=["dp-sgd"])) as folder:
        said, _ = ask(folder, text=plan().to_json(), work=WORK)
        assert said["code"] == "privacy"
        assert "protects all of its data" in said["why"]
        assert rows(folder) == []


def test_a_budget_for_examples_is_never_called_one_for_the_whole_data(tmp_path):
    folder = node(tmp_path / "node")
    with served(folder):
        assert ask(folder, text=plan().to_json(), work=WORK)[0]["ok"]
        assert ask(folder)[0][
            "ok"
        ]  # a release that protects the whole data protects each example, too
    edit(folder, 'unit = "example"', 'unit = "client"')
    with pytest.raises(LedgerError, match=r"releases that protect \(example, add-remove\)"):
        Service(folder)


FUSSY = {"name": "tests.fedlgm_nodes.service.test_service_hostile_questions:fussy", "least": 5.0}


def _condition() -> str:
    chosen, module = mechanisms.get("dp-sgd"), fussy(nodes.SHAPE, nodes.CLASSES, 5.0)
    trainer = ExampleTrainer(module, chosen.table(LayerTable.from_module(module)), chosen)
    return trainer.condition(torch.zeros(1, *nodes.SHAPE))


LOOKS = _condition()
"""What a guarantee assumes of a model that looks at values."""


def test_an_example_that_fails_does_not_show(tmp_path):
    """An error in place of an answer would be an answer without noise."""
    made = node(tmp_path / "node")
    edit(made, 'models = ["logistic"', f'models = ["{FUSSY["name"]}", "logistic"')
    x, y = (
        np.zeros((nodes.EXAMPLES, *nodes.SHAPE), np.float32),
        np.arange(nodes.EXAMPLES) % nodes.CLASSES,
    )
    x[3] = 9.0
    np.savez(tmp_path / "node.npz", x=x, y=y)
    with served(made) as folder:
        text, work = plan(rate=1.0, assumes=LOOKS).to_json(), WORK | {"model": FUSSY}
        refused, _ = ask(folder, text=plan(rate=1.0).to_json(), work=work)
        assert "the plan's guarantee omits a condition of the model" in refused["why"]
        said, body = ask(folder, text=text, work=work)
        assert said["ok"], said
        assert ask(folder, text=text, work=work)[1] == body
        assert len(rows(folder)) == 1
        assert "an input is larger than 5.0" in folder.path.with_name("node.log").read_text()


def test_an_example_that_fails_counts_as_zero_and_the_others_count(tmp_path):
    """Without the others, too, one example would move the sum by more than its own bound."""
    chosen, module = mechanisms.get("dp-sgd"), fussy(nodes.SHAPE, nodes.CLASSES, 5.0)
    layers = chosen.table(LayerTable.from_module(module))
    asked = chosen.plan(layers, plan(assumes=LOOKS).facts, Transcript.start(nodes.MODEL))
    x, y = torch.full((6, *nodes.SHAPE), 0.5), torch.arange(6) % nodes.CLASSES
    x[3] = 9.0

    def trainer(kind: type[ExampleTrainer]) -> ExampleTrainer:
        made = kind(fussy(nodes.SHAPE, nodes.CLASSES, 5.0), layers, chosen)
        made.weights.copy_(nodes.MODEL)
        return made

    keeping = trainer(NodeExamples)
    found, again = (keeping.sum(x, y, torch.arange(6), asked) for _ in range(2))
    others = trainer(ExampleTrainer).sum(
        x[[0, 1, 2, 4, 5]], y[[0, 1, 2, 4, 5]], torch.arange(5), asked
    )
    torch.testing.assert_close(found.values, others.values)
    torch.testing.assert_close(again.values, others.values)
    assert found.bounds == others.bounds
    alone = trainer(NodeExamples).sum(x, y, torch.tensor([3]), asked)
    assert not alone.values.any()


@pytest.mark.parametrize("kinds", [FEW, FEW + 4])
def test_the_first_answer_after_a_start_composes_nothing_of_the_past(tmp_path, monkeypatch, kinds):
    """To compose a hundred kinds of releases takes seconds: the start does, before the service says
    that it answers."""
    folder = node(tmp_path / "node")
    past = [privacy.events.gaussian_event(20.0 + i, 0.25) for i in range(kinds)]
    with folder.ledger() as ledger:
        for i, kind in enumerate(past):
            event = privacy.events.repeat_event(kind, STEPS)
            ledger.charge(
                f"r{i}", event, trust="local", run="old", round=i + 1, data="d", protects=EXAMPLE
            )
    service = Service(folder)
    composed = []
    compose = accountants.PldAccountant.compose
    monkeypatch.setattr(
        accountants.PldAccountant,
        "compose",
        lambda own, event, count=1: (composed.append(event), compose(own, event, count))[1],
    )
    question = nodes.asked(
        folder, plan=plan().to_json(), work=WORK, model=protocol.sha256(nodes.BODY)
    )
    answer = service.answer(Ask.model_validate(question.header(None)), nodes.BODY)
    service.close()
    assert answer.header["ok"]
    assert composed
    assert not [event for event in composed if event in past]
