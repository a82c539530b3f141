"""Tamperings with an honest certificate, by an operator who signs again: level 1 refuses each, also
with hashes, heads, Merkle root and epsilon rewritten to fit."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from safetensors.numpy import load, save

from fedlgm.privacy.signed import PAYLOAD_TYPE, signed_bytes
from fedlgm_lab.certificate import signing
from fedlgm_lab.certificate.releases import round_file
from fedlgm_lab.certificate.verifier.case import SIMULATION
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from fedlgm_lab.certificate.verifier.replay import replay
from tests.support.certificates import Certified, edit_plans, fit

Edit = Callable[[dict[str, Any]], object]


def _claim(name: str, value: Any) -> Edit:
    return lambda s: s["predicate"]["claim"].update({name: value})


def _scaled(name: str, factor: float) -> Edit:
    claim = lambda s: s["predicate"]["claim"]  # noqa: E731
    return lambda s: claim(s).update({name: claim(s)[name] * factor})


def _facts(**values: Any) -> Edit:
    return lambda s: edit_plans(s, lambda plan: plan["facts"].update(values))


def _sampling(**values: Any) -> Edit:
    return lambda s: edit_plans(s, lambda plan: plan["facts"]["sampling"].update(values))


def _recipe(old: str, new: str) -> Edit:
    def change(statement: dict[str, Any]) -> None:
        recipe = statement["predicate"]["recipe"]
        assert old in recipe["text"]
        recipe["text"] = recipe["text"].replace(old, new)
        recipe["sha256"] = hashlib.sha256(recipe["text"].encode()).hexdigest()

    return change


def _both(*edits: Edit) -> Edit:
    def change(statement: dict[str, Any]) -> None:
        for edit in edits:
            edit(statement)

    return change


def _rounds(change: Callable[[list[Any]], object]) -> Edit:
    return lambda s: change(s["predicate"]["rounds"])


def _without_last(statement: dict[str, Any]) -> None:
    predicate = statement["predicate"]
    predicate["rounds"].pop()
    predicate["ledger"]["rows"].pop()
    predicate["anchors"] = [a for a in predicate["anchors"] if a["round"] <= 6]


def _swap(rounds: list[Any]) -> None:
    rounds[1], rounds[2] = rounds[2], rounds[1]


def _quieter(statement: dict[str, Any]) -> None:
    """Every event with a larger multiplier than its plan."""
    predicate = statement["predicate"]
    for name, text in list(predicate["events"].items()):
        raw = json.loads(text)
        raw["event"]["noise_multiplier"] *= 1.5
        new = json.dumps(raw)
        digest = hashlib.sha256(new.encode()).hexdigest()
        predicate["events"] = {digest: new}
        for charge in predicate["ledger"]["rows"]:
            charge["event"] = digest if charge["event"] == name else charge["event"]


def _more_noise(plan: dict[str, Any]) -> None:
    plan["sigma"] = [1.5 * sigma for sigma in plan["sigma"]]


def _hidden_layer(plan: dict[str, Any]) -> None:
    plan["released"][0], plan["sigma"][0] = False, None


def _population(**values: Any) -> Edit:
    return lambda s: s["predicate"]["population"].update(values)


def _one_key(statement: dict[str, Any]) -> None:
    rows = statement["predicate"]["ledger"]["rows"]
    rows[3]["key"] = rows[2]["key"]


def _status(plan: dict[str, Any]) -> None:
    plan["facts"]["relation"] = plan["guarantee"]["relation"] = "replace-one"


def _entry(name: str, value: Any) -> Edit:
    return lambda s: s["predicate"]["rounds"][2].update({name: value})


_ELSEWHERE = "ab" * 32
EDITS: dict[str, Edit] = {
    "1 epsilon lowered": _scaled("epsilon", 0.5),
    "2 epsilon raised": _scaled("epsilon", 1.5),
    "3 delta raised": _claim("delta", 1e-3),
    "3 delta raised in the recipe too": _both(
        _claim("delta", 1e-4), _recipe("delta = 1e-05", "delta = 1e-04"), _facts(delta=1e-4)
    ),
    "4 delta lowered": _claim("delta", 1e-7),
    "4 delta lowered in the recipe too": _both(
        _claim("delta", 1e-7), _recipe("delta = 1e-05", "delta = 1e-07"), _facts(delta=1e-7)
    ),
    "5 unit": _claim("unit", "example"),
    "5 unit in the plans too": _both(
        _claim("unit", "user"),
        _recipe("[privacy]", '[privacy]\nunit = "user"'),
        lambda s: edit_plans(s, lambda plan: plan["guarantee"].update(unit="user")),
    ),
    "6 relation": _claim("relation", "replace-one"),
    "6 relation in the plans too": _both(
        _claim("relation", "replace-one"),
        _claim("status", "conditional"),
        lambda s: edit_plans(s, _status),
    ),
    "7 trust": _claim("trust", "local"),
    "8 conditional called proven": _both(
        lambda s: edit_plans(s, _status), _claim("relation", "replace-one")
    ),
    "8 proven called conditional": _claim("status", "conditional"),
    "9 a seed": _recipe("[run]", "[run]\nseed = 3"),
    "9 a seed, stated": _both(
        _recipe("[run]", "[run]\nseed = 3"),
        _claim("seed", "3"),
        _claim("status", SIMULATION),
        lambda s: s["predicate"]["start"].update(noise=None),
    ),
    "10 a round left out": _rounds(lambda rounds: rounds.pop(3)),
    "11 the last round left out": _without_last,
    "11 the last round left out, in the recipe too": _both(
        _without_last, _recipe("rounds = 7", "rounds = 6"), _facts(rounds=6)
    ),
    "12 rounds swapped": _rounds(_swap),
    "13 events with less cost": _quieter,
    "14 plans with more noise": lambda s: edit_plans(s, _more_noise),
    "15 sampling rate lowered": _both(_sampling(rate=0.1), _population(rate=0.1, denominator=6.0)),
    "15 sampling rate lowered outside the plans": _population(rate=0.1),
    "16 population enlarged": _population(size=600),
    "16 population enlarged in the plans too": _both(
        _sampling(population=600),
        _population(size=600, denominator=120.0),
        _recipe("clients = 60", "clients = 600"),
    ),
    "17 a layer marked as not released": lambda s: edit_plans(s, _hidden_layer),
    "18 clip lowered": lambda s: edit_plans(
        s, lambda plan: plan.update(clip=[0.5 * clip for clip in plan["clip"]])
    ),
    "19 one noise key twice": _one_key,
    "20 a released hash": _entry("released", _ELSEWHERE),
    "21 a head": _entry("head", _ELSEWHERE),
    "22 the ledger's head": lambda s: s["predicate"]["ledger"].update(head=f"7:{_ELSEWHERE}"),
    "23 commitment": lambda s: s["predicate"]["start"]["noise"].update(commitment=_ELSEWHERE),
    "24 beacon": lambda s: s["predicate"]["start"]["noise"].update(beacon=_ELSEWHERE),
    "25 Merkle root": lambda s: s["predicate"].update(keys_merkle_root=_ELSEWHERE),
    "26 no anchors": lambda s: s["predicate"].update(anchors=[]),
    "26 the last anchor removed": lambda s: s["predicate"]["anchors"].pop(),
    "26 the first anchor removed": lambda s: s["predicate"]["anchors"].pop(0),
    "30 code": lambda s: s["predicate"]["start"]["software"].update(source=_ELSEWHERE),
    "31 a field": lambda s: s["predicate"].update(certified_by="the office"),
    "31 a field of the claim": _claim("seal", "gold"),
    "31 an audit": _claim("audited_lower_bound", 0.1),
    "31 fewer limits": lambda s: s["predicate"]["not_covered"].pop(0),
    "31 protected from the server": _claim("protected_from", "everybody, the server too"),
    "another mechanism": _claim("mechanism", "dp-sgd"),
    "another accountant": _claim("composition", "rdp"),
    "another recipe": _recipe("server_lr = 0.2", "server_lr = 0.1"),
    "other rounding": lambda s: s["predicate"].update(arithmetic="separate"),
    "layers of other sizes": lambda s: s["predicate"]["start"]["layers"][0].__setitem__(1, 5),
}
REPAIRED = {
    *("1 epsilon lowered", "2 epsilon raised", "13 events with less cost", "21 a head"),
    *("22 the ledger's head", "25 Merkle root"),
}
"""Edits that the rewriting undoes, so that the honest certificate is left."""


def test_the_honest_certificate_holds(honest: Certified) -> None:
    case = honest.verify(honest.sign(honest.statement))
    assert case.notes == []
    assert case.claim["status"] == "proven"


@pytest.mark.parametrize("name", EDITS)
def test_a_tampering_is_refused(honest: Certified, name: str) -> None:
    statement = honest.copy()
    EDITS[name](statement)
    assert statement != honest.statement
    with pytest.raises((Refused, NotCheckable), match=r"^(check \d+|plan)"):
        honest.verify(honest.sign(statement))


@pytest.mark.parametrize("name", EDITS)
def test_a_tampering_that_is_made_to_fit_is_refused_or_undone(honest: Certified, name: str) -> None:
    statement = honest.copy()
    EDITS[name](statement)
    try:
        statement = fit(statement)
    except (Refused, NotCheckable):
        return  # nothing fits
    if name in REPAIRED:
        assert statement == honest.statement
        honest.verify(honest.sign(statement))
    else:
        with pytest.raises((Refused, NotCheckable), match=r"^(check \d+|plan)"):
            honest.verify(honest.sign(statement))


def test_a_seeded_run_that_states_its_seed_holds_only_if_the_caller_accepts_it(
    honest: Certified,
) -> None:
    statement = honest.copy()
    EDITS["9 a seed, stated"](statement)
    fit(statement)
    with pytest.raises(Refused, match="check 10"):
        honest.verify(honest.sign(statement), accepts=[SIMULATION])


def test_an_anchor_of_another_run_is_refused(honest: Certified, other: Certified) -> None:  # 27
    statement = honest.copy()
    statement["predicate"]["anchors"] = other.statement["predicate"]["anchors"]
    with pytest.raises(Refused, match="check 10"):
        honest.verify(honest.sign(statement))


def test_an_anchor_of_the_operator_or_of_a_stranger_does_not_count(
    honest: Certified, tmp_path: Path
) -> None:
    heads = {e["round"]: e["head"] for e in honest.statement["predicate"]["rounds"]}
    signing.create_key(tmp_path / "stranger.pem")
    for key in (honest.operator, signing.load_key(tmp_path / "stranger.pem")):
        statement = honest.copy()
        statement["predicate"]["anchors"] = [
            signing.sign_head(f"{n}:{heads[n]}", key) for n in (5, 7)
        ]
        named = [signing.public_hex(honest.witness), signing.public_hex(honest.operator)]
        with pytest.raises(Refused, match="check 10: no named witness saw the last round"):
            honest.verify(honest.sign(statement), witnesses=named)


def test_without_named_keys_the_outcome_is_not_that_it_holds(honest: Certified) -> None:
    certificate = honest.sign(honest.statement)
    with pytest.raises(NotCheckable, match=r"check 1: .* who signed"):
        honest.verify(certificate, key=None)
    with pytest.raises(NotCheckable, match=r"check 10: .*--witness"):
        honest.verify(certificate, witnesses=[])
    with pytest.raises(NotCheckable, match=r"check 13: .*--releases"):
        honest.verify(certificate, releases=None)
    accepted = ["unanchored", "unreplayed"]
    case = honest.verify(certificate, witnesses=[], accepts=accepted, releases=None)
    assert [note[:3] for note in case.notes] == ["10:", "13:"]


def test_another_model_is_refused(honest: Certified, other: Certified) -> None:  # 28
    with pytest.raises(Refused, match="check 12"):
        honest.verify(honest.sign(honest.statement), other.model)


def test_a_model_file_with_other_fixed_tensors_is_refused(honest: Certified) -> None:  # 29
    tensors = load(honest.model) | {"mask": np.ones(3, np.float32)}
    model = save(tensors)
    with pytest.raises(Refused, match="check 12"):
        honest.verify(honest.sign(honest.statement), model)
    statement = honest.copy()
    statement["subject"][0]["digest"]["sha256"] = hashlib.sha256(model).hexdigest()
    with pytest.raises(Refused, match="check 12"):
        honest.verify(honest.sign(statement), model)


@pytest.mark.parametrize("bit", [0, 17, 22])
def test_a_model_that_does_not_follow_from_the_releases_is_refused(
    honest: Certified, bit: int
) -> None:  # also the lowest bit of one parameter, and the subject rewritten
    tensors = {name: value.copy() for name, value in load(honest.model).items()}
    first = next(iter(tensors))
    tensors[first].reshape(-1)[0:1].view(np.uint32)[0] ^= 1 << bit
    model, statement = save(tensors), honest.copy()
    slots = [slot for _, _, slots in statement["predicate"]["start"]["layers"] for slot in slots]
    flat = np.concatenate([tensors[name].reshape(-1) for name, _ in slots])
    for place, content in enumerate((model, flat.tobytes())):
        statement["subject"][place]["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    with pytest.raises(Refused, match="check 13"):
        honest.verify(honest.sign(statement), model)


def test_bytes_that_are_not_canonical_are_refused(honest: Certified) -> None:  # 32
    good = rfc8785.dumps(honest.statement)
    texts = {
        "order": json.dumps(honest.statement, separators=(",", ":")).encode(),
        "space": good.replace(b":", b": ", 1),
        "twice": good.replace(b'{"_type"', b'{"_type":"x","_type"', 1),
        "NaN": good.replace(b'"audited_lower_bound":null', b'"audited_lower_bound":NaN'),
        "infinite": good.replace(b'"audited_lower_bound":null', b'"audited_lower_bound":1e400'),
        "zero": good.replace(b'"audited_lower_bound":null', b'"audited_lower_bound":-0.0'),
        "not JSON": good[:-1],
        "not text": b"\xff" + good,
        "deep": b"[" * 100_000,
    }
    for name, payload in texts.items():
        assert payload != good, name
        key = honest.operator
        envelope: dict[str, Any] = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [
                {
                    "keyid": signing.public_hex(key),
                    "sig": base64.b64encode(key.sign(signed_bytes(payload))).decode(),
                }
            ],
        }
        with pytest.raises(Refused, match="check 2"):
            honest.verify(rfc8785.dumps(envelope))


def test_another_or_a_second_signer_is_refused(honest: Certified, other: Certified) -> None:  # 33
    strangers = other.sign(honest.statement)
    with pytest.raises(Refused, match="check 1"):
        honest.verify(strangers)
    envelope = json.loads(honest.sign(honest.statement))
    envelope["signatures"] += json.loads(strangers)["signatures"]
    with pytest.raises(Refused, match=r"check 1: .* one signature"):
        honest.verify(rfc8785.dumps(envelope))
    envelope = json.loads(strangers)
    envelope["signatures"][0]["keyid"] = signing.public_hex(honest.operator)
    with pytest.raises(Refused, match="check 1: the signature"):
        honest.verify(rfc8785.dumps(envelope))


def test_a_certificate_of_another_run_is_refused(honest: Certified, other: Certified) -> None:  # 34
    statement = json.loads(json.dumps(other.statement))
    with pytest.raises(Refused, match="check 12"):
        honest.verify(honest.sign(statement), witnesses=[signing.public_hex(other.witness)])
    statement["subject"] = honest.statement["subject"]
    with pytest.raises(Refused, match="check 13"):
        honest.verify(honest.sign(statement), witnesses=[signing.public_hex(other.witness)])


def test_an_older_certificate_beside_the_final_model_is_refused(honest: Certified) -> None:  # 35
    statement = honest.copy()
    EDITS["11 the last round left out, in the recipe too"](statement)
    fit(statement)
    with pytest.raises(Refused, match="check 10: a witness saw another chain"):
        honest.verify(honest.sign(statement))
    statement["predicate"]["anchors"] = []
    with pytest.raises(Refused, match=r"check 13: .* do not follow"):
        honest.verify(honest.sign(statement), accepts=["unanchored"])


def test_noise_that_the_server_takes_off_again_is_refused(honest: Certified) -> None:  # 42
    case = honest.verify(honest.sign(honest.statement))
    sums = [
        np.frombuffer((honest.run / "private" / "sums" / round_file(n)).read_bytes())
        for n in range(1, 8)
    ]
    vectors = [np.frombuffer((honest.releases / "initial.f32").read_bytes(), np.float32), *sums]
    arithmetic = honest.statement["predicate"]["arithmetic"]
    flat = replay(iter(vectors), case.plans, case.sizes, case.step, arithmetic, range(1, 8))
    slots = [slot for _, _, slots in case.start["layers"] for slot in slots]
    ends = np.cumsum([size for _, size in slots])[:-1]
    named = zip(slots, np.split(flat, ends), strict=True)
    model, statement = save({name: part for (name, _), part in named}), honest.copy()
    for place, content in enumerate((model, flat.tobytes())):
        statement["subject"][place]["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    with pytest.raises(Refused, match=r"check 13: .* do not follow"):
        honest.verify(honest.sign(statement), model)


def test_other_versions_cannot_be_checked(honest: Certified) -> None:
    for name in ("_type", "predicateType"):
        statement = honest.copy()
        statement[name] += "2"
        with pytest.raises(NotCheckable, match="use the version that wrote it"):
            honest.verify(honest.sign(statement))
    envelope = json.loads(honest.sign(honest.statement))
    envelope["payloadType"] = "text/plain"
    with pytest.raises(NotCheckable, match="type"):
        honest.verify(rfc8785.dumps(envelope))


_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1e300, 2**53 - 1, "", "\x1b[2Jproven", "0" * 64, [], {}, [[]]),
    *({"*": 1}, "1e400", "inf", 0.5),
)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a statement, objects and lists too."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return [path, *(leaf for key, part in inner for leaf in _leaves(part, (*path, key)))]


def test_no_value_can_be_changed(honest: Certified) -> None:
    """Every value of the statement, replaced by every odd one; also those inside plans."""
    case = honest.verify(honest.sign(honest.statement))
    paths = [path for path in _leaves(honest.statement) if path and path[-1] != "name"]
    rng = np.random.default_rng(5)
    chosen = [(path, value) for path in paths for value in rng.choice(len(_VALUES), 2)]
    for path, number in chosen:
        statement, value = honest.copy(), _VALUES[number]
        place = statement
        for key in path[:-1]:
            place = place[key]
        if place[path[-1]] == value:
            continue
        place[path[-1]] = value
        with pytest.raises((Refused, NotCheckable)):
            honest.verify(honest.sign(statement), releases=None, accepts=["unreplayed"])
    assert case.notes == []


@pytest.mark.parametrize("number", range(len(_VALUES)))
def test_no_value_of_a_plan_makes_an_accident(honest: Certified, number: int) -> None:
    (text,) = honest.statement["predicate"]["plans"].values()
    for path in _leaves(json.loads(text)):
        if not path:
            continue
        statement = honest.copy()

        def change(plan: dict[str, Any], path: tuple[Any, ...] = path) -> None:
            place: Any = plan
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = _VALUES[number]

        edit_plans(statement, change)
        for fitted in (False, True):
            try:
                statement = fit(statement) if fitted else statement
            except (Refused, NotCheckable, ValueError, LookupError, TypeError, OverflowError):
                continue  # nothing fits
            if statement == honest.statement:
                continue
            with pytest.raises((Refused, NotCheckable)):
                honest.verify(honest.sign(statement), releases=None, accepts=["unreplayed"])
