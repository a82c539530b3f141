"""Options of mechanisms: public facts of a question, checked by the node's policy and by what is
installed there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedlgm import mechanisms, privacy
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import BelowBound
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm.training.example_level.trainer import Examples, ExampleTrainer, digest_of, local_steps
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.row import EXAMPLE
from fedlgm_nodes.service.work import Work, options_of
from tests.support import nodes
from tests.support.nodes import ask, hello, make_node, rows, served
from tests.support.patience import LIMIT_S

MODEL = {"name": "mlp", "hidden": [5]}  # two layers
MODULE = models.build("mlp", in_shape=nodes.SHAPE, classes=nodes.CLASSES, hidden=[5], seed=0)
WEIGHTS = LayerTable.from_module(MODULE).flatten(MODULE)
BODY = frames.npy(WEIGHTS.numpy())
PER_LAYER = {"name": "dp-sgd", "style": "per-layer", "allocation": "snr-consistent"}
ASKED: dict[str, dict[str, Any]] = {
    "per layer": PER_LAYER,
    "per layer, bounds from noisy bits": PER_LAYER | {"clip": "med", "norms": "quantile"},
    "per layer, public norms": PER_LAYER
    | {"clip": "med", "norms": "public", "public_norms": [2.0, 1.0]},
    "Auto-S": {"name": "auto-s", "stabiliser": 0.05},
    "DP-PSAC": {"name": "dp-psac", "bound": 0.5},
    "weights from a noisy query": {"name": "lm-dp-sgd", "emphasis": 2.0, "error_rates": [0.4, 0.3]},
    "public weights": {"name": "lm-dp-sgd", "weights": "public", "strengths": [1.0, 3.0]},
    "an allocation of whole updates": {"name": "snr-consistent", "bound": 0.5},
}


def built(options: dict[str, Any]) -> Any:
    return mechanisms.get(options["name"], **options_of(options))


def plan(options: dict[str, Any], multiplier: float = 6.0) -> ReleasePlan:
    chosen = built(options)
    steps = LocalSteps(3, 0.25, 6.0) if chosen.unit == "example" else None
    relation = "add-remove" if steps else "replace-one"
    facts = RunFacts(multiplier, Sampling("poisson", 3, 1.0), relation, "local", 10, steps=steps)  # type: ignore[arg-type]
    return chosen.plan(
        chosen.table(LayerTable.from_module(MODULE)), facts, Transcript.start(WEIGHTS)
    )


def work(options: Any) -> dict[str, Any]:
    return nodes.WORK | {"mechanism": options, "model": MODEL}


def asked(
    folder: NodeFolder, options: Any, like: dict[str, Any] = PER_LAYER, **more: Any
) -> dict[str, Any]:
    """The answer's header to a question whose plan is that of `like`, and whose work says
    `options`."""
    more = {"text": plan(like).to_json(), "body": BODY} | more
    return ask(folder, work=work(options), **more)[0]


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFolder]:
    """One node for tests after which it must be as before."""
    with served(make_node(tmp_path_factory.mktemp("lasting") / "node", unit="example")) as folder:
        yield folder
        assert rows(folder) == []
        assert hello(folder)["ok"]


@pytest.mark.parametrize("case", ASKED)
def test_a_node_carries_out_what_is_asked(tmp_path, case):
    """The very numbers of the mechanism with these options, each charged at its own price."""
    options = ASKED[case]
    chosen, text = built(options), plan(options).to_json()
    with served(make_node(tmp_path / "node", unit="example", test_seed=1)) as folder:
        said, body = ask(folder, text=text, body=BODY, work=work(options))
        assert said["ok"], said
        found = frames.vector(body, ("<f4", "<f8"))
        (row,) = rows(folder)
    one = plan(options)
    assert len(found) == one.size
    if chosen.unit == "client":
        assert row.trust == "local"
        return
    assert (row.trust, row.protects) == ("local", EXAMPLE)
    event = privacy.events.repeat_event(
        privacy.events.gaussian_event(one.effective_multiplier, 0.25), 3
    )
    assert privacy.events.decode(json.loads(row.event)) == event
    module = models.build("mlp", in_shape=nodes.SHAPE, classes=nodes.CLASSES, hidden=[5], seed=0)
    trainer = ExampleTrainer(module, one.layers, chosen)
    data = node_data.read(folder.policy().data, folder.path)
    keys = KeyRing.from_seed(1).derive(WEIGHTS.numpy().tobytes(), text.encode())
    training = Work.parse(work(options), folder.policy()).local()
    clients = [Examples(folder.policy().node.client, data.x, data.y, digest_of(data.x, data.y))]
    ((expected, _),) = local_steps(trainer, training, WEIGHTS, clients, one, keys, 1)
    assert (found == expected.numpy()).all()


REFUSED: dict[str, tuple[Any, str]] = {
    "a name alone": ("dp-sgd", "dictionary"),
    "no name": ({"style": "per-layer"}, "mechanism None is not allowed"),
    "a name that is a list": ({"name": ["dp-sgd"]}, "is not allowed"),
    "an unknown option": (PER_LAYER | {"hook": "x"}, "no option 'hook'; known: bound"),
    "the published variant": (PER_LAYER | {"variant": "published"}, "variant"),
    "a variant, even the sound one": (PER_LAYER | {"variant": "sound"}, "variant"),
    "an unknown style": (PER_LAYER | {"style": "by hand"}, "unknown style 'by hand'"),
    "an unknown allocation": (PER_LAYER | {"allocation": "none"}, "unknown allocation"),
    "a bound without end": (PER_LAYER | {"bound": 10**400}, "bound"),
    "a negative bound": (PER_LAYER | {"bound": -1.0}, "bound must be finite and positive"),
    "a bound of another type": (PER_LAYER | {"bound": "1"}, "bound must be a number"),
    "a bound that is true": (PER_LAYER | {"bound": True}, "bound must be a number"),
    "an option as an object": (
        PER_LAYER | {"public_norms": {"a": 1}},
        "public_norms must be a list of numbers",
    ),
    "an option in depth": (
        PER_LAYER | {"public_norms": [[[1.0]]]},
        "public_norms must be a list of numbers",
    ),
    "many options": (PER_LAYER | {"public_norms": [1.0] * 10_000}, "characters"),
    "text that no log can hold": (
        PER_LAYER | {"\ud800\n\u202e": 1},
        r"no option '\ud800\n\u202e'; known",
    ),
    "flat bounds for a plan per layer": ({"name": "dp-sgd"}, "plan"),
    "a mechanism that bounds whole updates": ({"name": "snr-consistent"}, "bounds whole clients"),
    "Auto-S without a stabiliser": (
        {"name": "auto-s", "stabiliser": 0.0},
        "stabiliser must be at least 1e-06",
    ),
    "error rates above a half": ({"name": "lm-dp-sgd", "error_rates": [0.9, 0.1]}, "0.5"),
    "shares of the budget above it": (
        {"name": "lm-dp-sgd", "share": 2.0},
        "share must lie in (0, 1)",
    ),
    "a mechanism that nobody listed": ({"name": "os:system", "command": "true"}, "is not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_in_one_sentence_and_costs_nothing(lasting, case):
    options, message = REFUSED[case]
    said = asked(lasting, options)
    assert said["code"] in ("work", "plan")
    assert message in said["why"]
    assert "see this node's log" not in said["why"]
    assert len(said["why"]) < 450


@pytest.mark.parametrize("section", ["model", "task"])
def test_thousands_of_options_are_refused_before_anything_is_built(lasting, section):
    asked_for = {
        "model": {"name": "mlp", "hidden": [1] * 4000},
        "task": {"name": "classification", "x": [1] * 4000},
    }
    said, _ = ask(lasting, work=nodes.WORK | {section: asked_for[section]})
    assert (said["code"], "longer than 4096 characters" in said["why"]) == ("work", True)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_numbers_that_are_none_are_refused(lasting, number):
    """JSON has no NaN, and Python reads 1e999 as infinity."""
    header = json.dumps(nodes.asked(lasting, work=work(PER_LAYER | {"bound": 12345.5})).header())
    said, _ = frames.exchange(
        str(lasting.socket), header.replace("12345.5", number), BODY, timeout=LIMIT_S
    )
    assert said["code"] == "frame"


def test_bounds_are_those_of_the_plan_whatever_the_options_say(lasting):
    """An option cannot make a mechanism keep wider bounds than those that are paid for."""
    text = json.dumps(json.loads(plan(PER_LAYER).to_json()) | {"clip": [1e-3, 1e-3]})
    wide = {"name": "lm-dp-sgd", "weights": "public", "bound": 0.01}
    crafted = json.dumps(
        json.loads(text) | {"clip": [0.009, 0.009]}
    )  # weights whose squares add up to 1.62
    assert asked(lasting, wide, text=crafted)["code"] == "work"
    largest = json.dumps(json.loads(text) | {"clip": [2.0, 2.0], "sigma": [20.0, 20.0]})
    assert asked(lasting, PER_LAYER | {"bound": 4.0}, text=largest)["code"] == "privacy"


def test_a_query_is_asked_once(lasting):
    """Each is free if its noise is large, and is computed in every step: thousands of them would
    take hours."""
    options = ASKED["per layer, bounds from noisy bits"]
    raw = json.loads(plan(options).to_json())
    again = raw | {"queries": [[BelowBound.name, 1e6]] * 2}
    said = asked(lasting, options, text=json.dumps(again))
    assert said["code"] == "plan", said
    assert "duplicate" in said["why"], said


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
NAMES = st.sampled_from(
    ["bound", "style", "allocation", "clip", "norms", "public_norms", "floor", "variant", "name"]
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(options=st.dictionaries(NAMES | st.text(max_size=6), VALUES, max_size=3))
def test_whatever_the_options_are(lasting_releaser, options):
    """Admitted with the plan's bounds, or refused; never anything else."""
    text = plan(PER_LAYER).to_json()
    refused = None
    try:
        parsed = Work.parse(work(PER_LAYER | options), lasting_releaser.policy)
        request = lasting_releaser.understand(1, text, parsed, WEIGHTS.numpy())
        kept = request.work.built().scaling(request.plan)
    except Refusal as refusal:
        refused = refusal.code
    assert refused in ("work", "plan") or (kept.bounds(2) <= request.plan.clip * (1 + 1e-9)).all()


@pytest.fixture(scope="module")
def lasting_releaser(tmp_path_factory: pytest.TempPathFactory) -> Releaser:
    return releaser(make_node(tmp_path_factory.mktemp("releaser") / "node", unit="example"))


def releaser(folder: NodeFolder) -> Releaser:
    data = node_data.read(folder.policy().data, folder.path)
    return Releaser(folder.policy(), data, node_data.digest(data), b"0" * 32)


# -- who asked, and again ----------------------------------------------------------------------------------------------


def test_a_signature_covers_the_options(tmp_path):
    server = Ed25519PrivateKey.generate()
    with served(
        make_node(tmp_path / "node", unit="example", server_key=protocol.public_text(server))
    ) as folder:
        text = plan(PER_LAYER).to_json()
        question = nodes.asked(folder, plan=text, model=protocol.sha256(BODY), work=work(PER_LAYER))
        signed = question.header(server)
        for other in (
            PER_LAYER | {"bound": 0.9},
            PER_LAYER | {"floor": 0.1},
            {"name": "lm-dp-sgd", "weights": "public"},
        ):
            changed = signed | {"work": work(other)}
            said, _ = frames.exchange(str(folder.socket), changed, BODY, timeout=LIMIT_S)
            assert said["code"] == "unsigned"
        assert rows(folder) == []
        assert frames.exchange(str(folder.socket), signed, BODY, timeout=LIMIT_S)[0]["ok"]
    assert len(rows(folder)) == 1


def test_other_options_are_another_release_with_other_noise(tmp_path):
    """Even where they change nothing: two answers never share their noise, and each is charged."""
    with served(make_node(tmp_path / "node", unit="example")) as folder:
        text, found = plan(PER_LAYER, 50.0).to_json(), []
        for options in (
            PER_LAYER,
            PER_LAYER | {"floor": 0.1},
            PER_LAYER | {"bound": 0.9},
            PER_LAYER,
        ):
            said, body = ask(folder, text=text, body=BODY, work=work(options))
            assert said["ok"], said
            found.append(frames.vector(body, ("<f4", "<f8")))
        assert (found[0] == found[3]).all()  # the same question
        for i in range(3):
            for j in range(i):
                assert abs(np.corrcoef(found[i], found[j])[0, 1]) < 0.4
        assert len(rows(folder)) == 3
        assert len({row.event for row in rows(folder)}) == 1


def test_another_protocol_is_named(lasting):
    header = nodes.asked(lasting).header() | {"protocol": protocol.PROTOCOL - 1}
    said, _ = frames.exchange(str(lasting.socket), header, BODY, timeout=LIMIT_S)
    assert said["code"] == "protocol"
    assert f"protocol {protocol.PROTOCOL - 1}" in said["why"]
    assert f"protocol {protocol.PROTOCOL}," in said["why"]


# -- the policy --------------------------------------------------------------------------------------------------------


def limited(path: Path, table: str) -> Policy:
    folder = make_node(path, unit="example")
    folder.policy_file.write_text(folder.policy_file.read_text() + f"\n{table}\n")
    return folder.policy()


def test_a_policy_lists_the_options_that_may_be_asked_for(tmp_path):
    policy = limited(
        tmp_path / "node",
        '[allow.options.dp-sgd]\nstyle = ["per-layer"]\nallocation = ["uniform", "snr-consistent"]',
    )
    assert Work.parse(work(PER_LAYER), policy).built() == built(PER_LAYER)
    for options, message in (
        (
            PER_LAYER | {"allocation": "max-snr"},
            "allocation = 'max-snr'; allowed: 'uniform', 'snr-consistent'",
        ),
        (PER_LAYER | {"bound": 0.5}, "bound = 0.5; allowed: only its default"),
    ):
        with pytest.raises(Refusal, match="work: ") as refusal:
            Work.parse(work(options), policy)
        assert message in refusal.value.why
    assert (
        Work.parse(work({"name": "auto-s", "stabiliser": 0.1}), policy).built().stabiliser == 0.1
    )  # not listed there


def test_a_default_may_be_stated_where_values_are_listed(tmp_path):
    """A recipe that writes a default out asks for the same work as one that leaves it out."""
    policy = limited(tmp_path / "node", '[allow.options.dp-sgd]\nstyle = ["per-layer"]')
    stated = {"name": "dp-sgd", "style": "per-layer", "bound": 1.0, "clip": "eq"}
    assert Work.parse(work(stated), policy).built() == built(
        {"name": "dp-sgd", "style": "per-layer"}
    )
    for changed in ({"bound": 0.9}, {"clip": None}, {"bounds": None}):
        with pytest.raises(Refusal, match="allowed: only its default"):
            Work.parse(work(stated | changed), policy)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            '[allow.options.dp-sdg]\nstyle = ["flat"]',
            "allow: options names 'dp-sdg', which mechanisms does not list",
        ),
        ('[allow.options.dp-sgd]\nstyle = "flat"', "allow.options.dp-sgd.style"),
        ("[allow.options]\ndp-sgd = 1", "allow.options.dp-sgd"),
    ],
)
def test_what_is_wrong_with_a_table_of_options_is_named(tmp_path, table, message):
    with pytest.raises(ConfigError) as error:
        limited(tmp_path / "node", table)
    assert message in str(error.value)


def test_a_mechanism_of_the_operators_own_takes_the_options_that_he_lists(tmp_path, monkeypatch):
    """What its options do nobody knows but he: a file's name may be among them."""
    (tmp_path / "own_rules.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedlgm.mechanisms.dp_sgd import DPSGD\n\n\n"
        "@dataclass(frozen=True)\n"
        "class OwnRules(DPSGD):\n"
        '    note: str = "plain"\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "own_rules:OwnRules"
    folder = make_node(tmp_path / "node", unit="example", mechanisms=[name])
    assert Work.parse(work({"name": name}), folder.policy()).built().note == "plain"
    with pytest.raises(Refusal, match="allowed: only its default"):
        Work.parse(work({"name": name, "note": "other"}), folder.policy())
    with folder.policy_file.open("a") as file:
        file.write(f'\n[allow.options."{name}"]\nnote = ["other"]\n')
    assert (
        Work.parse(work({"name": name, "note": "other"}), folder.policy()).built().note == "other"
    )


def test_a_model_begins_only_with_files_that_the_policy_pins(tmp_path):
    file = tmp_path / "base.safetensors"
    save_file(MODULE.state_dict(), file)
    digest = models.digest_of_file(file)
    folder = make_node(tmp_path / "node")
    nodes.edit(folder, "tasks = [", f'weights = {{"{digest}" = "{file}"}}\ntasks = [')
    data = node_data.read(folder.policy().data, folder.path)
    releaser = Releaser(folder.policy(), data, node_data.digest(data), b"0" * 32)
    uniform = {"name": "uniform"}
    adapters = {"rank": 2, "targets": ["fc1", "fc2"], "style": "ffa", "seed": 5}

    def understood(weights: object, hidden: int = 5):
        module = models.build(
            "mlp", in_shape=nodes.SHAPE, classes=nodes.CLASSES, hidden=[hidden], adapters=adapters
        )
        table = LayerTable.from_module(module)
        facts = RunFacts(
            6.0,
            Sampling("fixed", 3, 1.0),
            "replace-one",
            "local",
            rounds=3,
            epsilon=8.0,
            delta=1e-5,
        )
        text = built(uniform).plan(table, facts, Transcript(0, ())).to_json()
        work = {
            "mechanism": uniform,
            "model": MODEL | {"hidden": [hidden], "adapters": adapters, "weights": weights},
        }
        parsed = Work.parse(work, folder.policy())
        return releaser.understand(1, text, parsed, table.flatten(module).numpy())

    request = understood(digest)
    releaser.prepare(request)
    module = releaser.workshop.module(request.work)
    fixed = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    assert torch.equal(fixed["fc1.base.weight"], MODULE.fc1.weight)
    for weights in ("0" * 64, str(file), None, 7):
        with pytest.raises(
            Refusal, match=r"model\.weights: no file with SHA-256 .* is allowed on this node"
        ):
            understood(weights)
    with pytest.raises(Refusal, match=r"the tensors of that file are not those of the model$"):
        understood(digest, hidden=6)
    save_file({name: value + 1 for name, value in MODULE.state_dict().items()}, file)
    with pytest.raises(Refusal, match=r"the node's file .* is missing or has changed$"):
        releaser.workshop.module(request.work)
    file.unlink()
    with pytest.raises(Refusal, match=r"the node's file .* is missing or has changed$"):
        releaser.workshop.module(request.work)


@pytest.mark.parametrize(
    "line", ['weights = {"abc" = "/base"}', f'weights = {{"{"0" * 64}" = "base"}}']
)
def test_a_pin_is_a_hash_and_an_absolute_path(tmp_path, line):
    folder = make_node(tmp_path / "node")
    nodes.edit(folder, "tasks = [", f"{line}\ntasks = [")
    with pytest.raises(ConfigError, match=r"allow\.weights.*(SHA-256|absolute)"):
        folder.policy()


def test_columns_classes_and_figures_of_a_table_are_the_policys(tmp_path):
    """A model that reads one column as another gives a wrong result that nobody is told of."""
    folder = make_node(tmp_path / "node")
    table = {"inputs": ["age", "dose"], "labels": ["no", "yes"], "standardise": {"age": [50, 20]}}
    work = nodes.WORK | {"table": table}
    assert Work.parse(work, folder.policy()).table is not None  # arrays have no names
    values = folder.policy().model_dump()
    values["data"] |= {"kind": "csv", "labels": "ill", "features": ("age", "dose"), "classes": 2}
    values["data"] |= {"class_names": ("no", "yes"), "standardise": {"age": (50.0, 20.0)}}
    policy = Policy.model_validate(values)
    parsed = Work.parse(work, policy)
    assert "table" in parsed.values()
    assert "table" not in Work.parse(nodes.WORK, policy).values()
    for key, other, name in (
        ("inputs", ["dose", "age"], "features"),
        ("labels", ["yes", "no"], "class_names"),
        ("standardise", {"age": [50, 21]}, "standardise"),
        ("standardise", {}, "standardise"),
    ):
        with pytest.raises(Refusal, match=f"the work's {name} are not those of"):
            Work.parse(work | {"table": table | {key: other}}, policy)
    with pytest.raises(Refusal, match=r"work\.table\.inputs"):
        Work.parse(work | {"table": {}}, policy)
