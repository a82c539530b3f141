"""Reports on Python scripts, which are read but not run."""

from __future__ import annotations

import ast
from typing import Any

from fedlgm.check.readers.common import join
from fedlgm.check.readers.flower import (
    FEDAVG,
    LOCAL_MOD,
    MEANS,
    STRATEGIES,
    flower,
    privacy_config,
)
from fedlgm.check.readers.nvflare import FILTERS, nvflare
from fedlgm.check.readers.opacus import opacus_arguments
from fedlgm.check.readers.opacus_script import attached_facts, opacus_facts
from fedlgm.check.readers.tensorflow_privacy import tensorflow_privacy
from fedlgm.check.report import Report
from fedlgm.check.settings import ACCOUNTED
from fedlgm.check.source import UNREAD, Source, call_name
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError

_OPTIMIZER = ("l2_norm_clip", "noise_multiplier", "num_microbatches")
_OPACUS = ("make_private", "make_private_with_epsilon")
_TENSORFLOW: dict[str, tuple[str, ...]] = {
    "compute_dp_sgd_privacy": ("n", "batch_size", "noise_multiplier", "epochs", "delta"),
    "compute_dp_sgd_privacy_statement": (
        *("number_of_examples", "batch_size", "num_epochs", "noise_multiplier", "delta"),
        *("used_microbatching", "max_examples_per_user"),
    ),
}
_EVENTS: dict[str, tuple[str, ...]] = {
    "GaussianDpEvent": ("noise_multiplier",),
    "PoissonSampledDpEvent": ("sampling_rate",),
    "SelfComposedDpEvent": ("event", "steps"),
    "GaussianPrivacyEvent": ("noise_multiplier", "batch_size", "population"),
    "compute_rdp": ("sampling_rate", "noise_multiplier", "steps", "orders"),
    "compose": ("event", "steps"),
    "step": (),
}
"""Calls that show what an accountant composes, with the names of their positional arguments."""
_CALLS = (*_OPACUS, "LocalDpMod", *STRATEGIES, *_TENSORFLOW, *FILTERS)
_ALIASES = {
    **{"q": "sampling_rate", "sampling_probability": "sampling_rate"},
    **{"sample_rate": "sampling_rate", "sample_size": "batch_size", "count": "steps"},
    **{"population_size": "population", "n": "population", "number_of_examples": "population"},
    **{"num_epochs": "epochs", "l2_norm_clip": "clip", "target_delta": "delta"},
}
_IGNORED = {
    *("module", "optimizer", "criterion", "data_loader", "strategy", "accountant"),
    *("batch_first", "loss_reduction", "noise_generator", "grad_sample_mode", "wrap_model"),
    *("rand_on_empty", "target_unclipped_quantile", "clipbound_learning_rate"),
    *("max_clipbound", "min_clipbound"),
}


def read_script(text: str, **settings: Any) -> Report:
    """Check a training script by its calls; the script is not run.

    The function reads calls of Opacus (`make_private`, `make_private_with_epsilon`), Flower
    (strategies for differential privacy, `LocalDpMod`), TensorFlow Privacy
    (`compute_dp_sgd_privacy`, or events of dp_accounting) and NVFlare (its privacy filters). It
    reads arguments that consist of numbers, texts, arithmetic, and names to which the script
    assigns a value only once. Loaders, loops, optimizers, seeds and mods are read for what they
    show about the run.

    Args:
        text: source of the script.
        settings: further settings, which the script does not show.

    Raises:
        ConfigError: the text is not Python, has no such call or several of them, or contradicts a
            further setting.

    Example:
        >>> script = "engine.make_private(noise_multiplier=1.0, max_grad_norm=args.clip)"
        >>> report = read_script(script, batch_size=100, population=10_000, epochs=5, delta=1e-5)
        >>> [verdict.why for verdict in report.verdicts if verdict.rule == "reading"][1]
        'Line 1: max_grad_norm = args.clip could not be read.'
    """
    source = Source(text)
    calls = source.named(*_CALLS) or source.named("GaussianDpEvent", "compute_rdp")
    attached = [  # in Opacus before 1.0, the engine takes the noise
        call
        for call in source.named("PrivacyEngine", "DPOptimizer")
        if "noise_multiplier" in source.arguments(call) and not calls
    ]
    calls = calls or attached
    if len(calls) != 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        raise ConfigError(
            f"the script must have exactly one call of {', '.join(_CALLS)}; got "
            + (f"calls on lines {lines}: check each with flags instead" if calls else "none")
        )
    (call,) = calls
    name = call_name(call)
    reading = [
        Verdict(
            "conditional",
            f"The script was not run: only line {call.lineno} ({name}) and what it refers to were "
            "read.",
        )
    ]
    if name in _OPACUS or attached:
        values = _values(source, call, (), reading)
        facts = opacus_facts(source, call, reading, "runs" in settings)
        if attached:
            values = {
                key: values[key] for key in ("noise_multiplier", "max_grad_norm") if key in values
            }
            facts |= attached_facts(source, call)
        if _accounted(source):
            facts["accounted"] = {**(facts.get("accounted") or {}), **_accounted(source)}
        values = {
            key: value for key, value in values.items() if key not in facts or facts[key] == value
        }
        return opacus_arguments(values, *reading, **join(facts, settings))
    if name in FILTERS:
        filters = [{"path": name, "args": _values(source, call, (), reading)}]
        config = {"task_result_filters": [{"tasks": ["train"], "filters": filters}]}
        return nvflare(config, **join({"steps": _single(source, "num_rounds")}, settings))
    if name == "LocalDpMod" or name in STRATEGIES:
        return _flower(source, call, reading, settings)
    return _tensorflow(source, call, reading, settings)


def _values(
    source: Source, call: ast.Call, names: tuple[str, ...], reading: list[Verdict]
) -> dict[str, Any]:
    """Return those arguments of the checked call that can be read; `names` are the names of the
    positional arguments.
    """
    for word in call.keywords:
        if word.arg is None:
            why = f"Line {call.lineno}: the arguments **{ast.unparse(word.value)} are not read."
            reading.append(Verdict("conditional", why))
    arguments = source.arguments(call, names)
    concerned = tuple(name for name in arguments if name not in _IGNORED)
    values = _read(source, call, concerned, reading, names)
    defaults = {"poisson_sampling", "clipping"} & set(arguments)
    return {**dict.fromkeys(defaults), **values}


def _read(
    source: Source,
    call: ast.Call,
    names: tuple[str, ...],
    reading: list[Verdict],
    positions: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the values of the given arguments of a call. Arguments that cannot be read are
    reported in `reading`.
    """
    values: dict[str, Any] = {}
    for name, node in source.arguments(call, positions).items():
        value = source.value(node)
        if name in names and value is not UNREAD:
            values[name] = value
        elif name in names:
            why = f"Line {node.lineno}: {name} = {ast.unparse(node)} could not be read."
            reading.append(Verdict("conditional", why))
    return values


def _accounted(source: Source) -> dict[str, Any]:
    """Return the values that the script itself passes to an accountant, without values that differ
    between its calls.
    """
    values: dict[str, set[Any]] = {}
    for call in source.named(*_EVENTS):
        words = source.words(call, _EVENTS[call_name(call)])
        if call_name(call) == "step" and "noise_multiplier" not in words:
            continue
        for key, value in words.items():
            name = _ALIASES.get(key, key)
            if name in ACCOUNTED and isinstance(value, int | float):
                values.setdefault(name, set()).add(value)
    return {name: min(several) for name, several in values.items() if len(several) == 1}


def _single(source: Source, word: str, *names: str) -> Any:
    """Return the value of an argument if all calls that have it (of all functions, or of the
    functions `names`) agree; otherwise None.
    """
    calls = source.named(*names) if names else source.calls
    words = [source.words(call, (word,) if names else ()) for call in calls]
    values = {values[word] for values in words if isinstance(values.get(word), int | float)}
    return values.pop() if len(values) == 1 else None


def _flower(
    source: Source, call: ast.Call, reading: list[Verdict], settings: dict[str, Any]
) -> Report:
    name = call_name(call)
    names = LOCAL_MOD if name == "LocalDpMod" else STRATEGIES[name]
    positions = names if name == "LocalDpMod" else ("strategy", *names)
    values = _values(source, call, positions, reading)
    facts: dict[str, Any] = {"steps": _single(source, "num_rounds")}
    if any(ast.unparse(seed.func).endswith("p.random.seed") for seed in source.named("seed")):
        facts["noise_seed"] = "public"  # Flower draws its noise from NumPy's generator
    if name == "LocalDpMod":
        if len(values) < len(names):
            raise ConfigError(
                "the script's LocalDpMod has arguments that cannot be read: use flags"
            )
        return flower(name, values, *reading, **join(facts, settings))
    values = {**dict.fromkeys(names), **values}
    clients = _single(source, "num_clients"), _single(source, "num_supernodes")
    facts["population"] = next((number for number in clients if number), None)
    for config in source.named("PrivacyConfig"):
        words = source.words(config)
        if {"neighboring_relation", "sampling_method"} <= set(words):
            facts |= privacy_config(words)
    for strategy in source.named(*MEANS):
        values |= _read(source, strategy, FEDAVG, reading)
        if not {"fraction_train", "fraction_fit"} & set(source.arguments(strategy)):
            values["fraction_train"] = 1.0
    if any(word.arg == "accountant" for word in call.keywords):  # it refuses anything else
        facts |= {"weights": "uniform", "denominator": "expected"}
        facts["batch_size"] = values["num_sampled_clients"]
    apps = source.named("ClientApp")
    mods = " ".join(
        ast.unparse(source.expression(word.value)) for app in apps for word in app.keywords
    )
    if "ClientSide" in name and apps and "clipping_mod" not in mods:
        why = f"Line {apps[0].lineno}: the app has no mod that bounds the clients' updates."
        reading.append(Verdict("broken", why))
        facts["clipping"] = "none"
    facts["accounted"] = _accounted(source) or None
    return flower(name, values, *reading, **join(facts, settings))


def _tensorflow(
    source: Source, call: ast.Call, reading: list[Verdict], settings: dict[str, Any]
) -> Report:
    """Check a script that uses TensorFlow Privacy. The values that are accounted for are also taken
    as the values of the run, unless the script shows other values.
    """
    name = call_name(call)
    if name in _TENSORFLOW:
        words = _values(source, call, _TENSORFLOW[name], reading)
        facts = {_ALIASES.get(key, key): value for key, value in words.items()}
        accounted = {key: value for key, value in facts.items() if key in ACCOUNTED}
    else:
        facts = accounted = _accounted(source)
        if source.named("PoissonSampledDpEvent", "compute_rdp"):
            facts = {**facts, "accounted_as": "poisson"}
        else:  # without sampling, every example takes part in each release
            facts = {"noise_multiplier": facts.get("noise_multiplier"), "accounted_as": "none"}
            accounted = {**accounted, "sampling_rate": 1.0}
        for other in source.named("get_epsilon", "get_privacy_spent"):
            words = source.words(other, ("delta",) if call_name(other) == "get_epsilon" else ())
            facts["delta"] = words.get("target_delta", words.get("delta"))
    run = _training(source, reading)
    if "clipping" in run:
        facts.pop("used_microbatching", None)
    facts |= {"accounted": accounted or None, **run}
    return tensorflow_privacy(*reading, **join(facts, settings))


def _training(source: Source, reading: list[Verdict]) -> dict[str, Any]:
    """Return the settings that TensorFlow's optimizer, input pipeline and `fit` show."""
    run: dict[str, Any] = {"batch_size": _single(source, "batch_size", "batch")}
    for call in source.calls:
        kind = call_name(call)
        named = kind.startswith(("DP", "VectorizedDP")) and kind.endswith("Optimizer")
        if named or "l2_norm_clip" in source.arguments(call):
            words = _read(source, call, _OPTIMIZER, reading, _OPTIMIZER)
            run |= {_ALIASES.get(key, key): value for key, value in words.items()}
            given = "num_microbatches" in source.arguments(call, _OPTIMIZER)
            if words.get("num_microbatches") is None and given == ("num_microbatches" in words):
                run["clipping"] = "unit"  # by default, each example is a microbatch
        elif kind == "fit":
            words = _read(source, call, ("epochs", "batch_size"), reading)
            run |= words
            if "batch_size" in words:  # the data are arrays, which Keras shuffles
                run["sampler"] = "shuffle"
        elif kind == "shuffle":
            run["sampler"] = "shuffle"
        elif kind in ("set_seed", "set_random_seed"):
            run["noise_seed"] = "public"
    if source.named("BatchNormalization"):
        run |= {"clipping": "mixed", "num_microbatches": None}
    return {name: value for name, value in run.items() if value is not None}
