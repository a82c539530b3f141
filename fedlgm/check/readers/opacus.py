"""Reader of Opacus's engine and loader, or of the arguments of its `make_private`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedlgm.check.readers.common import attribute, report
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.checks import check_known
from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives


def opacus(
    engine: Any, loader: Any, *, optimizer: Any = None, delta: float | None = None, **settings: Any
) -> Report:
    """Check a training run with Opacus, after or before training.

    Args:
        engine: the `PrivacyEngine`, whose accountant has a history of noise, rates and steps.
        loader: the loader that the training loop uses, from which the sampler is read.
        optimizer: the `DPOptimizer`, from which noise, bound and clipping are read. Before the
            first step, the noise can be read only from the optimizer.
        delta: the delta for which epsilon is stated.
        settings: further settings, such as `epochs` before the first step.

    Raises:
        ConfigError: an object lacks an attribute, or a value cannot be used.

    Example:
        >>> from types import SimpleNamespace as Object
        >>> history = Object(history=[(1.0, 0.1, 50)], mechanism=lambda: "rdp")
        >>> engine = Object(accountant=history, get_epsilon=lambda delta: 7.0)
        >>> loader = Object(dataset=range(1000), batch_size=100, sampler=None, drop_last=False)
        >>> report = opacus(engine, loader, delta=1e-5)
        >>> report.status, report.settings.sampler, report.settings.epsilon
        ('broken', 'shuffle', 7.0)
    """
    accountant = attribute(engine, "accountant", "the engine")
    history = _history(attribute(accountant, "history", "the engine's accountant"))
    read: dict[str, Any] = {"unit": "example", "delta": delta, **_loader(loader)}
    assumed: dict[str, Any] = {
        "clipping": "unit",
        "denominator": "expected",
        "accounted_as": "poisson",
    }
    reading = []
    if getattr(getattr(loader, "sampler", None), "replacement", False):
        why = "The sampler draws with replacement: a batch may hold an example several times."
        reading.append(Verdict("broken", why, bound=False))
    mechanism = attribute(accountant, "mechanism", "the engine's accountant")()
    read["accountant"] = mechanism if mechanism in ("rdp", "gdp", "prv") else None
    if history:
        counted = {
            "noise_multiplier": min(noise for noise, _, _ in history),
            "steps": sum(steps for _, _, steps in history),
        }
        rates = [rate for _, rate, _ in history]
        if read["sampler"] == "poisson":
            if len(set(rates)) > 1:  # the rates of steps differ, and the loader has the last one
                read["sampling_rate"] = max(read["sampling_rate"], *rates)
            counted["sampling_rate"] = max(rates)
        if len(history) > 1:
            why = "Steps differ: the figure assumes the least noise and largest rate in all steps."
            reading.append(Verdict("holds", why))
        assumed |= counted
        read["accounted"] = counted
        if delta is not None:
            assumed["epsilon"] = float(engine.get_epsilon(delta))
    if optimizer is not None:
        if hasattr(optimizer, "max_grad_norm"):
            read |= _optimizer(optimizer)
        else:
            kind = type(optimizer).__name__
            reading.append(
                Verdict("broken", f"{kind} is not Opacus's: it adds no noise.", bound=False)
            )
        if getattr(optimizer, "generator", None) is not None and not optimizer.secure_mode:
            why = "The noise comes from a generator of the caller, whose seed must be secret."
            reading.append(Verdict("conditional", why))
        if read.get("noise_multiplier", 0.0) > assumed.get("noise_multiplier", math.inf):
            del read["noise_multiplier"]  # a schedule raised it after the last step
    return report(read, settings, *reading, assumed=assumed)


def _history(history: Any) -> list[tuple[float, float, int]]:
    try:
        rows = [(float(noise), min(1.0, float(rate)), int(n)) for noise, rate, n in history]
        if not all(math.isfinite(noise) for noise, _, _ in rows):
            raise ValueError("noise is not finite")
        return rows
    except (TypeError, ValueError) as error:
        raise ConfigError(
            "the accountant's history must be a list of (noise multiplier, rate, steps), got "
            f"{history!r:.100}"
        ) from error


_POISSON = ("UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler")
"""Names of Opacus's Poisson samplers."""


def _loader(loader: Any) -> dict[str, Any]:
    """Return the settings that describe the sampler of a PyTorch loader."""
    try:
        size = len(attribute(loader, "dataset", "the loader"))
    except TypeError as error:
        raise ConfigError("the loader's data set has no length: state population") from error
    kind = type(getattr(loader, "batch_sampler", None)).__name__
    if kind in _POISSON:
        rate = float(attribute(loader, "sample_rate", "the loader"))
        return {"sampler": "poisson", "sampling_rate": rate, "population": size}
    read: dict[str, Any] = {"population": size, "batch_size": getattr(loader, "batch_size", None)}
    if read["batch_size"] is not None:
        read["batch_size"] = min(read["batch_size"], size)
    read["drop_last"] = getattr(loader, "drop_last", None)
    sampler = getattr(loader, "sampler", None)
    plain = type(sampler).__name__ in ("RandomSampler", "SequentialSampler", "NoneType")
    once = not getattr(sampler, "replacement", False)
    once = once and getattr(sampler, "num_samples", size) == size
    read["sampler"] = "shuffle" if plain and once and read["batch_size"] else None
    if read["sampler"] is None:
        read["batch_size"] = None
    return read


def _optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the settings that describe noise, bound and clipping of Opacus's optimizer."""
    bound = optimizer.max_grad_norm
    clip = math.hypot(*map(float, bound)) if isinstance(bound, list | tuple) else float(bound)
    noise = attribute(optimizer, "noise_multiplier", "the optimizer")
    values: dict[str, Any] = {"clip": clip, "noise_multiplier": float(noise)}
    count_std = getattr(optimizer, "unclipped_num_std", None)
    if count_std is not None:
        values |= {"clipping": "adaptive", "count_std": float(count_std)}
    return values


def opacus_arguments(values: Mapping[str, Any], *reading: Verdict, **settings: Any) -> Report:
    """Check the arguments of Opacus's `make_private` or `make_private_with_epsilon`.

    Args:
        values: the arguments by name.
        reading: verdicts on what could not be read.
        settings: further settings, such as `batch_size`, `population` and `epochs`.

    Raises:
        ConfigError: an argument is unknown or cannot be used.

    Example:
        >>> report = opacus_arguments(
        ...     {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": True},
        ...     batch_size=100, population=10_000, epochs=5, delta=1e-5,
        ... )
        >>> report.status, round(report.epsilon, 2)
        ('holds', 1.33)
    """
    poisson = values.get("poisson_sampling", True)
    styles = {"flat": "unit", "per_layer": "unit", "adaptive": "adaptive"}
    for name in values:
        if name not in _OPACUS:
            raise ConfigError(f"opacus: unknown argument {name!r}; {alternatives(name, _OPACUS)}")
    style = values.get("clipping", "flat")
    if style is not None:
        check_known("clipping", style, styles, "opacus")
    if poisson not in (True, False, None):
        raise ConfigError(f"opacus: poisson_sampling must be true or false, got {poisson!r}")
    bound = values.get("max_grad_norm")
    assumed: dict[str, Any] = {
        "clipping": None if style is None else styles[style],
        "denominator": "expected",
        "accounted_as": "poisson",
        "sampler": {True: "poisson", False: "shuffle", None: None}[poisson],
    }
    if poisson is False and settings.get("sampler") == "poisson":
        raise ConfigError("opacus: poisson_sampling is false, and sampler is 'poisson'")
    read = {
        "unit": "example",
        "noise_multiplier": values.get("noise_multiplier"),
        "clip": None if isinstance(bound, list | tuple) else bound,
        "count_std": values.get("unclipped_num_std"),
        "epsilon": values.get("target_epsilon"),
        "delta": values.get("target_delta"),
        "epochs": values.get("epochs"),
    }
    size, population = settings.get("batch_size"), settings.get("population")
    if settings.get("sampler", assumed["sampler"]) == "poisson":
        # Opacus draws a Poisson sample in each step, with the rate 1 / (steps per epoch of the
        # loader)
        dropped = settings.pop("drop_last", False)
        if isinstance(size, int) and isinstance(population, int) and 0 < size <= population:
            steps = population // size if dropped else -(-population // size)
            assumed["sampling_rate"] = 1 / steps
    return report(read, settings, *reading, assumed=assumed)


_OPACUS = (
    *("noise_multiplier", "max_grad_norm", "poisson_sampling", "clipping", "unclipped_num_std"),
    *("target_epsilon", "target_delta", "epochs", "secure_mode", "grad_sample_mode"),
)
