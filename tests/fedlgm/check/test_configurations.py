"""Three sets of configurations of four frameworks, half of them broken."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedlgm.check import read_script
from fedlgm.check.configuration_file import check_values

FILES = ("configurations.toml", "scripts.toml", "further.toml")
SETS = [
    tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))["configuration"]
    for name in FILES
]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Epsilon of a Gaussian release by its closed form (Balle and Wang 2018), from below."""

    def excess(epsilon: float) -> float:
        first, second = norm.cdf(mu / 2 - epsilon / mu), norm.cdf(-mu / 2 - epsilon / mu)
        return float(first - math.exp(epsilon) * second - delta)

    return float(brentq(excess, 0, 200, xtol=1e-12)) * (1 - 1e-9)


@pytest.mark.parametrize(
    "expected", [*SETS[0], *SETS[1], *SETS[2]], ids=lambda expected: str(expected["name"])
)
def test_the_verdict_is_the_expected_one(expected: dict[str, Any]) -> None:
    if "script" in expected:
        report = read_script(expected["script"], **expected["settings"])
    else:
        report = check_values(expected["run"])
    assert report.status == expected["status"], str(report)
    broken = [verdict.rule for verdict in report.verdicts if verdict.status == "broken"]
    assert sorted(broken) == sorted(expected.get("broken", [])), str(report)
    assert set(report.missing) >= set(expected.get("missing", []))
    if "missing" not in expected and expected["status"] == "holds":
        assert not report.missing
    if expected.get("none"):
        assert (report.epsilon, report.rates) == (None, None)
    if "gaussian" in expected:
        count, multiplier = expected["gaussian"]
        exact = gaussian_epsilon(math.sqrt(count) / multiplier, report.settings.delta)
        assert exact <= report.epsilon <= exact * (1 + 1e-6)
    assert report.sentence().startswith("epsilon stated: ")


@pytest.mark.parametrize("configurations", SETS, ids=FILES)
def test_each_framework_has_as_many_and_half_of_them_are_broken(configurations: list[Any]) -> None:
    frameworks = Counter(expected["name"].partition(":")[0] for expected in configurations)
    assert len(frameworks) == 4
    assert len(set(frameworks.values())) == 1
    broken = [expected for expected in configurations if expected["status"] == "broken"]
    assert 2 * len(broken) == len(configurations)
