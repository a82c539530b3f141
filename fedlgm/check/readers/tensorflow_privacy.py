"""Reader of the hyperparameters of TensorFlow Privacy."""

from __future__ import annotations

from typing import Any

from fedlgm.check.readers.common import join, report
from fedlgm.check.report import Report
from fedlgm.check.verdict import Verdict
from fedlgm.checks import check_positive
from fedlgm.errors import ConfigError

_ORDERS = (*(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5), *range(5, 64), *(128, 256, 512))
"""Renyi orders with which `compute_dp_sgd_privacy` computes epsilon."""


def tensorflow_privacy(*reading: Verdict, **values: Any) -> Report:
    """Check a run that is described by hyperparameters of TensorFlow Privacy.

    Args:
        reading: verdicts on what could not be read.
        values: `n` (or `number_of_examples`), `batch_size`, `noise_multiplier`, `epochs` (or
            `num_epochs`), `delta`, `l2_norm_clip`, `num_microbatches`, `used_microbatching` and
            `max_examples_per_user`, with the meaning that they have in its functions and
            optimizers; further names are settings. `compute_dp_sgd_privacy` assumes Poisson
            sampling, so the `sampler` of the actual input pipeline has to be stated.

    Raises:
        ConfigError: a name is unknown, or a value cannot be used.

    Example:
        >>> values = {"n": 60_000, "batch_size": 250, "noise_multiplier": 1.1, "epochs": 60}
        >>> report = tensorflow_privacy(**values, delta=1e-5, num_microbatches=250)
        >>> report.status, report.missing
        ('conditional', ('sampler',))
    """
    settings = dict(values)
    assumed: dict[str, Any] = {
        "unit": "example",
        "denominator": "expected",
        "accounted_as": "poisson",
        "accountant": "rdp",
        "orders": _ORDERS,
    }
    for name, setting in (
        ("n", "population"),
        ("number_of_examples", "population"),
        ("num_epochs", "epochs"),
        ("l2_norm_clip", "clip"),
        ("max_examples_per_user", "units_per_person"),
    ):
        value = settings.pop(name, None)
        if value is not None:
            settings = join(settings, {setting: value})
    read: dict[str, Any] = {}
    microbatches = settings.pop("num_microbatches", None)
    uses = settings.pop("used_microbatching", None)
    if microbatches is not None and "batch_size" in settings:
        check_positive(num_microbatches=microbatches, batch_size=settings["batch_size"])
        read["clipping"] = "unit" if microbatches == settings["batch_size"] else "microbatch"
    elif uses is not None:
        if not isinstance(uses, bool):
            raise ConfigError(f"used_microbatching must be true or false, got {uses!r}")
        read["clipping"] = "microbatch" if uses else "unit"
    return report(read, settings, *reading, assumed=assumed)
