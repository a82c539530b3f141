"""A second verifier of level 1, written from docs/how-to/certificate.md ("The format") alone.

It shares no code with `fedlgm_lab.certificate.verifier`, so an error that both would make has to be
in the page. It does not compute random allocation and Skellam noise, which `dp_accounting` lacks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from dp_accounting import dp_event, pld, rdp

KIND = "application/vnd.in-toto+json"
FIELDS = {
    "statement": "_type predicate predicateType subject",
    "predicate": "anchors arithmetic claim events keys_merkle_root ledger not_covered plans "
    "population recipe rounds start",
    "claim": "audited_lower_bound claimed_epsilon composition delta epsilon mechanism protected_from "
    "relation seed status trust unit variant",
    "population": "denominator rate sampling size",
    "recipe": "sha256 text",
    "start": "fixed initial layers noise owner software",
    "ledger": "head owner rows",
    "row": "claim client event guarantee key protects round",
    "round": "head plan released round row",
    "anchor": "by head round signature",
}
SENTENCES = {
    "central": "e22bb62d246bd8c0116240707d90533f52ab6260694e0cdc81ca18b7b62b00e6",
    "local": "3159d96b51b1565fc7402fe44312e03fb1d7acbede3c14bb570d3cbaeef43421",
    "distributed": "6701c606be642922dcf8d45623ec3932046a1def704bc0391447976ae43e2971",
}


class Wrong(Exception):
    """A check does not hold."""


def must(holds: bool, problem: str) -> None:
    if not holds:
        raise Wrong(problem)


def sha(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def digest(*fields: Any) -> str:
    parts = [field if isinstance(field, bytes) else str(field).encode() for field in fields]
    return sha(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


def canonical(value: Any) -> str:
    """RFC 8785 for the values that certificates hold."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        must(abs(value) < 2**53, "a whole number is too large")
        return str(value)
    if isinstance(value, float):
        must(math.isfinite(value), "a number is not finite")
        sign, digits, place = "-" if value < 0 else "", *_digits(abs(value))
        if value == 0:
            return "0"
        if 0 < place <= 21:
            whole = digits[:place].ljust(place, "0")
            return sign + whole + ("." + digits[place:] if len(digits) > place else "")
        if -6 < place <= 0:
            return f"{sign}0.{'0' * -place}{digits}"
        rest = "." + digits[1:] if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{rest}e{place - 1:+d}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    names = sorted(value, key=lambda name: name.encode("utf-16-be"))
    return "{" + ",".join(f"{canonical(name)}:{canonical(value[name])}" for name in names) + "}"


def _digits(value: float) -> tuple[str, int]:
    """The shortest digits d1 d2 ... and n with value = 0.d1d2... times 10^n."""
    mantissa, _, exponent = repr(value).partition("e")
    whole, _, rest = mantissa.partition(".")
    digits, place = whole + rest, len(whole) + int(exponent or 0)
    stripped = digits.lstrip("0")
    return stripped.rstrip("0") or "0", place - (len(digits) - len(stripped))


def signed(key: str, signature: bytes, text: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def read(data: bytes, key: str) -> dict[str, Any]:
    """The statement that a key signed."""
    envelope = parse(data.removesuffix(b"\n"))
    must(set(envelope) == {"payload", "payloadType", "signatures"}, "not an envelope")
    must(envelope["payloadType"] == KIND, "another type")
    must(len(envelope["signatures"]) == 1, "not one signature")
    (signature,) = envelope["signatures"]
    payload = base64.b64decode(envelope["payload"], validate=True)
    text = f"DSSEv1 {len(KIND)} {KIND} {len(payload)} ".encode() + payload
    must(signature["keyid"] == key, "signed by somebody else")
    must(signed(key, base64.b64decode(signature["sig"], validate=True), text), "a wrong signature")
    return parse(payload)


def parse(data: bytes) -> Any:
    try:
        value = json.loads(data)
        must(canonical(value).encode() == data, "not canonical JSON")
    except (ValueError, RecursionError) as error:
        raise Wrong("not JSON") from error
    return value


def check_fields(statement: dict[str, Any]) -> None:
    predicate = statement["predicate"]
    records = [("statement", statement), ("predicate", predicate)]
    records += [(name, predicate[name]) for name in ("claim", "population", "recipe", "start")]
    records += [("ledger", predicate["ledger"])]
    for name, rows in (("row", "ledger"), ("round", "rounds"), ("anchor", "anchors")):
        held = predicate["ledger"]["rows"] if rows == "ledger" else predicate[rows]
        records += [(name, record) for record in held]
    for name, record in records:
        must(sorted(record) == FIELDS[name].split(), f"{name} has other fields")
    must(statement["_type"] == "https://in-toto.io/Statement/v1", "another statement")
    must(statement["predicateType"] == "urn:fedlgm:privacy-certificate:v2", "another version")


def down(value: float) -> float:
    if value == 0 or math.isinf(value):
        return value
    scale = 10.0 ** (8 - math.floor(math.log10(value)))
    return math.floor(value * scale) / scale


def gaussian(multiplier: float, rate: float = 1.0) -> dict[str, Any]:
    if math.isinf(multiplier):
        return {"type": "NoOpDpEvent"}
    plain = {"type": "GaussianDpEvent", "noise_multiplier": multiplier}
    if rate == 1:
        return plain
    return {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": plain}


def cost(plan: dict[str, Any], place: int) -> dict[str, Any]:
    """Event of the round at a place, from 0."""
    facts, sampling = plan["facts"], plan["facts"]["sampling"]
    factor = 2 if facts["relation"] == "replace-one" else 1
    pairs = [
        (clip, sigma)
        for clip, sigma, released in zip(plan["clip"], plan["sigma"], plan["released"], strict=True)
        if released
    ]
    least, separation = down(facts["noise_multiplier"] * (1 - 2e-8)), sampling.get("separation")
    must("block" not in sampling, "random allocation is not computed here")
    if plan["family"] == "laplace":
        multiplier = down(1 / float(np.sum([clip / sigma for clip, sigma in pairs]))) / factor
        loss = 1 / multiplier
        rate = sampling["rate"] if facts["trust"] == "central" else 1.0
        must(
            rate == 1 or factor == 1, "sampled Laplace noise under replace-one is not computed here"
        )
        plain = {"type": "LaplaceDpEvent", "noise_multiplier": 1 / loss}
        if rate == 1:
            return plain
        return {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": plain}
    ratios = np.array([clip / sigma for clip, sigma in pairs if clip > 0])
    effective = down(float(np.sum(ratios**2)) ** -0.5)
    if separation is not None:
        must(effective >= least, "a round has less noise than the run")
        column = facts.get("noise", {}).get("coefficients") or _coefficients(facts)
        must(all(np.diff([*column, 0.0]) <= 0), "only decreasing C is computed here")
        within = min(1.0, separation * sampling["rate"])
        if sampling["scheme"] == "grouped-poisson" and within < 1:
            moved = math.sqrt(sum(c * c for c in column)) if place % separation == 0 else 0.0
        else:
            lags, within = [place - start for start in range(0, place + 1, separation)], 1.0
            moved = sum(column[lag] for lag in lags if lag < len(column))
        return gaussian(down(least / (moved * factor)) if moved > 0 else math.inf, within)
    if facts["trust"] == "distributed":
        must("noise" not in facts["shares"], "Skellam noise is not computed here")
        multiplier = effective / factor
        return {"type": "ZCDpEvent", "rho": 0.5 / multiplier**2, "xi": 0.0}
    steps = facts.get("steps")
    if steps:
        one = gaussian(effective / factor, steps["rate"])
        composed = {"type": "SelfComposedDpEvent", "event": one, "count": steps["count"]}
        return composed if steps["count"] > 1 else one
    return gaussian(effective / factor, sampling["rate"] if facts["trust"] == "central" else 1.0)


def _coefficients(facts: dict[str, Any]) -> list[float]:
    """First column of C: of buffers, or of the identity."""
    noise = facts.get("noise")
    if noise is None:
        return [1.0]
    pairs = list(zip(noise["decays"], noise["scales"], strict=True))
    rest = [sum(s * d**j for d, s in pairs) for j in range(noise["rounds"] - 1)]
    return [1.0, *rest]


def event_of(raw: dict[str, Any]) -> dp_event.DpEvent:
    fields = {name: value for name, value in raw.items() if name != "type"}
    if "event" in fields:
        fields["event"] = event_of(fields["event"])
    return getattr(dp_event, raw["type"])(**fields)


def epsilon_of(texts: Iterable[str], claim: dict[str, Any]) -> float:
    """Epsilon of the events of one client."""
    return _epsilon_of(tuple(Counter(texts).items()), claim["composition"], claim["delta"])


@lru_cache
def _epsilon_of(counts: tuple[tuple[str, int], ...], composition: str, delta: float) -> float:
    """Kept: a certificate and its tamperings seldom differ in their events."""
    accountant = pld.PLDAccountant() if composition == "pld" else rdp.RdpAccountant()
    for text, count in counts:
        accountant.compose(event_of(json.loads(text)), count)
    return float(accountant.get_epsilon(delta))


def check_claim(predicate: dict[str, Any], plans: list[dict[str, Any]], clients: int) -> None:
    claim, recipe, first = predicate["claim"], tomllib.loads(predicate["recipe"]["text"]), plans[0]
    privacy, seed = recipe["privacy"], recipe["run"].get("seed")
    for plan in plans:
        must(plan["facts"] == first["facts"], "plans have other facts")
        must(plan["guarantee"]["unit"] == claim["unit"], "plans protect another unit")
        must(plan["guarantee"]["status"] in ("proven", "conditional"), "a plan is not private")
        must(plan["protected"] is True and plan["queries"] == [], "a plan is of another kind")
    facts, sampling = first["facts"], first["facts"]["sampling"]
    sampled = (
        sampling["rate"] < 1 and facts["trust"] == "central" and not sampling.get("separation")
    )
    conditional = (
        any(plan["guarantee"]["status"] == "conditional" for plan in plans)
        or bool(facts.get("assumes"))
        or (facts["relation"] == "replace-one" and sampled and first["family"] == "gaussian")
    )
    status = "simulation" if seed is not None else "conditional" if conditional else "proven"
    right = {
        "unit": privacy.get("unit", "client"),
        "relation": facts["relation"],
        "trust": privacy["trust"],
        "delta": privacy["delta"],
        "status": status,
        "mechanism": recipe["mechanism"]["name"],
        "variant": recipe["mechanism"]["variant"],
        "composition": privacy["accountant"],
        "audited_lower_bound": None,
        "seed": None if seed is None else str(seed),
    }
    must({name: claim[name] for name in right} == right, "the claim is not the run's")
    must(facts["trust"] == claim["trust"], "the plans have another trust")
    sentences = [claim["protected_from"], predicate["not_covered"]]
    must(sha(canonical(sentences)) == SENTENCES[claim["trust"]], "sentences were changed")
    must(seed is None, "the seed is public")
    must(0 < claim["delta"] <= 1 / (10 * sampling["population"]), "delta is too large")
    population = {
        "size": sampling["population"],
        "rate": sampling["rate"],
        "sampling": sampling["scheme"],
        "denominator": sampling["rate"] * sampling["population"],
    }
    must(predicate["population"] == population, "another population")
    if claim["unit"] == "client" or "steps" in facts:
        must(sampling["population"] == clients, "another number of clients")
    must(sampling.get("of") == ("user" if claim["unit"] == "user" else None), "another unit")
    rounds = recipe["federation"]["rounds"]
    must([entry["round"] for entry in predicate["rounds"]] == [*range(1, rounds + 1)], "rounds")
    must(facts["rounds"] == rounds, "the plans are for other rounds")


def check_charges(predicate: dict[str, Any], plans: list[dict[str, Any]]) -> None:
    rows, events, central = (
        predicate["ledger"]["rows"],
        predicate["events"],
        predicate["claim"]["trust"] == "central",
    )
    must(set(events) == {row["event"] for row in rows}, "events of other rows")
    must(all(sha(text) == name for name, text in events.items()), "an event has another text")
    must(len({row["key"] for row in rows}) == len(rows), "two rows have one noise")
    protects = f"{plans[0]['guarantee']['unit']}, {plans[0]['facts']['relation']}"
    for row in rows:
        must(row["protects"] == protects, "a row protects another unit")
        must((row["client"] == -1) == (central or row["round"] == 0), "a row of another party")
    for entry, plan in zip(predicate["rounds"], plans, strict=True):
        right = cost(plan, entry["round"] - 1)
        joint = "separation" in plan["facts"]["sampling"]
        of_round = [place for place, row in enumerate(rows, 1) if row["round"] == entry["round"]]
        if central:
            must(entry["row"] in of_round, "a round has no charge")
            of_round = [entry["row"]]
        for place in of_round:
            must(place <= entry["row"], "a charge after its release")
            stated = json.loads(events[rows[place - 1]["event"]])
            must(json.dumps(stated) == events[rows[place - 1]["event"]], "an event's form")
            must(
                stated == right or (joint and alike(stated, right)), "another cost than the plan's"
            )


def alike(stated: Any, right: Any) -> bool:
    """Whether two events differ in the last digits of the multiplier alone, on the safe side."""
    if "event" in right:
        inner = alike(stated.get("event", {}), right["event"])
        return inner and {**stated, "event": 0} == {**right, "event": 0}
    if {**stated, "noise_multiplier": 0} != {**right, "noise_multiplier": 0}:
        return False
    return bool(1 - 1e-8 <= stated["noise_multiplier"] / right["noise_multiplier"] <= 1)


def check_chain(predicate: dict[str, Any]) -> None:
    ledger, start = predicate["ledger"], predicate["start"]
    owner = sha(predicate["recipe"]["text"])
    must({owner} == {predicate["recipe"]["sha256"], start["owner"], ledger["owner"]}, "owner")
    heads = [digest("", owner)]
    for row in ledger["rows"]:
        fields = [row["round"], row["client"], row["key"], predicate["events"][row["event"]]]
        fields += [row["claim"], row["protects"], row["guarantee"]]
        while fields[-1] == "":
            fields.pop()
        heads.append(digest(heads[-1], *fields))
    must(ledger["head"] == f"{len(ledger['rows'])}:{heads[-1]}", "the ledger's head")
    head = digest("fedlgm releases v1", canonical(start))
    for entry in predicate["rounds"]:
        facts = (entry["round"], heads[entry["row"]], entry["plan"], entry["released"])
        head = digest(head, *facts)
        must(entry["head"] == head, f"the head of round {entry['round']}")
    level = [digest("leaf", row["key"]) for row in ledger["rows"]]
    while len(level) > 1:
        odd = [level[-1]] if len(level) % 2 else []
        inner = zip(level[::2], level[1::2], strict=False)
        level = [digest("node", left, right) for left, right in inner] + odd
    must(predicate["keys_merkle_root"] == level[0], "the root over the keys")


def check_anchors(predicate: dict[str, Any], witness: str) -> None:
    heads, seen = {entry["round"]: entry["head"] for entry in predicate["rounds"]}, [0]
    for anchor in predicate["anchors"]:
        text = f"fedlgm anchor v1\n{anchor['round']}:{anchor['head']}\n".encode()
        must(signed(anchor["by"], bytes.fromhex(anchor["signature"]), text), "an anchor")
        must(heads.get(anchor["round"]) == anchor["head"], "an anchor of another chain")
        seen += [anchor["round"]] if anchor["by"] == witness else []
    must(sorted(seen)[-1] == len(heads), "no anchor of the last round")
    must(max(np.diff(sorted(seen))) <= 5, "too few anchors")


def tensors_of(model: bytes) -> dict[str, bytes]:
    """The bytes of each tensor in a safetensors file."""
    length = int.from_bytes(model[:8], "little")
    header, data = json.loads(model[8 : 8 + length]), model[8 + length :]
    header.pop("__metadata__", None)
    return {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}


def nearest(exact: Fraction) -> np.float32:
    """The float32 nearest to an exact number; of two, the even one."""
    guess = np.float32(float(exact))
    near = [
        guess,
        np.nextafter(guess, np.float32(-np.inf)),
        np.nextafter(guess, np.float32(np.inf)),
    ]
    return min(near, key=lambda x: (abs(Fraction(float(x)) - exact), x.view(np.uint32) & 1))


def check_model(statement: dict[str, Any], plans: list[Any], model: bytes, folder: Path) -> None:
    predicate, start = statement["predicate"], statement["predicate"]["start"]
    files = [entry["digest"]["sha256"] for entry in statement["subject"]]
    tensors = tensors_of(model)
    slots = [name for _, _, parts in start["layers"] for name, _ in parts]
    must(sorted([*slots, *start["fixed"]]) == sorted(tensors), "other tensors")
    must(all(sha(tensors[name]) == fixed for name, fixed in start["fixed"].items()), "fixed tensor")
    flat = b"".join(tensors[name] for name in slots)
    must(files == [sha(model), sha(flat)], "another model")
    sizes = [size for _, size, _ in start["layers"]]
    must(all(size == sum(n for _, n in parts) for _, size, parts in start["layers"]), "sizes")
    recipe = tomllib.loads(predicate["recipe"]["text"])
    name, lr, mu = (recipe["federation"][f"server_{k}"] for k in ("optimizer", "lr", "momentum"))
    if (predicate["claim"]["unit"], predicate["claim"]["trust"]) == ("example", "central"):
        name, lr, mu = (recipe["training"][k] for k in ("optimizer", "lr", "momentum"))
        name = "momentum" if name == "sgd" and mu else name
    must(name in ("sgd", "momentum"), "another step")
    initial = (folder / "initial.f32").read_bytes()
    must(sha(initial) == start["initial"], "other initial weights")
    x, v = np.frombuffer(initial, "<f4"), None
    charged = {row["round"] for row in predicate["ledger"]["rows"]}
    for entry, plan in zip(predicate["rounds"], plans, strict=True):
        data = (folder / f"round-{entry['round']:06d}.f64").read_bytes()
        must(sha(data) == entry["released"], f"the release of round {entry['round']}")
        u, mask = np.zeros(len(x), np.float32), np.repeat(plan["released"], sizes)
        released = np.frombuffer(data, "<f8")
        must(len(released) == mask.sum(), "a release of another size")
        must(entry["round"] in charged or not released.any(), "a round charges nobody")
        u[mask] = (released / predicate["population"]["denominator"]).astype(np.float32)
        if name == "momentum" and mu:
            u = v = u if v is None else np.float32(mu) * v + u
        x = step(x, u, np.float32(lr), predicate["arithmetic"])
    must(x.astype("<f4").tobytes() == flat, "the model does not follow from the releases")


def step(x: np.ndarray, u: np.ndarray, lr: np.float32, arithmetic: str) -> np.ndarray:
    must(arithmetic in ("fused", "separate"), "another arithmetic")
    if arithmetic == "separate":
        return x + lr * u
    # Rounding is monotone, so rounding twice errs only if the first result is halfway between two.
    total = x.astype(np.float64) + u.astype(np.float64) * float(lr)
    out = total.astype(np.float32)
    over = np.where(total > out, np.float32(np.inf), np.float32(-np.inf))
    halfway = 2 * total == out.astype(np.float64) + np.nextafter(out, over)
    for place in np.flatnonzero(halfway):
        exact = Fraction(float(x[place])) + Fraction(float(lr)) * Fraction(float(u[place]))
        out[place] = nearest(exact)
    return out


def verify(
    certificate: bytes, model: bytes, key: str, witness: str, releases: Path, code: str
) -> float:
    """The computed epsilon of a certificate that holds; else `Wrong` or an error of its form."""
    statement = read(certificate, key)
    check_fields(statement)
    predicate = statement["predicate"]
    texts = predicate["plans"]
    must(all(sha(text) == name for name, text in texts.items()), "a plan has another text")
    must(all(json.dumps(json.loads(text)) == text for text in texts.values()), "a plan's form")
    must({entry["plan"] for entry in predicate["rounds"]} == set(texts), "plans of other rounds")
    plans = [json.loads(texts[entry["plan"]]) for entry in predicate["rounds"]]
    clients = tomllib.loads(predicate["recipe"]["text"])["federation"]["clients"]
    check_claim(predicate, plans, clients)
    check_charges(predicate, plans)
    check_chain(predicate)
    check_anchors(predicate, witness)
    rows, claim = predicate["ledger"]["rows"], predicate["claim"]
    spent = {
        tuple(sorted(predicate["events"][r["event"]] for r in rows if r["client"] in (-1, client)))
        for client in {row["client"] for row in rows}
    }
    epsilon = max(epsilon_of(texts, claim) for texts in spent)
    # Another grid gives another bound: 0.1 % above, and 0.1 % for the grid on both sides.
    must(epsilon * 0.999 <= claim["epsilon"] <= epsilon * 1.002, f"epsilon is {epsilon}")
    check_model(statement, plans, model, releases)
    must(predicate["start"]["software"]["source"] == code, "other code")
    return epsilon
