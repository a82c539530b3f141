"""Runs of the installed Opacus, with and without Poisson sampling."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fedlgm.check
from fedlgm.errors import ConfigError
from fedlgm.privacy import epsilon, gaussian_epsilon

DATA = TensorDataset(torch.zeros(200, 3), torch.zeros(200, dtype=torch.long))


def broken(report: fedlgm.check.Report) -> list[str]:
    return [verdict.rule for verdict in report.verdicts if verdict.status == "broken"]


def train(
    epochs: int, accountant: str = "rdp", batch_size: int = 20, **options: Any
) -> tuple[PrivacyEngine, DataLoader[Any], Any, DataLoader[Any]]:
    """Engine, returned loader, optimizer and original loader after training."""
    drop_last = options.pop("drop_last", False)
    engine = PrivacyEngine(accountant=accountant)
    model = torch.nn.Linear(3, 2)
    raw = DataLoader(DATA, batch_size=batch_size, shuffle=True, drop_last=drop_last)
    options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=raw,
            **options,
        )
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return engine, loader, optimizer, raw


def test_poisson_samples_hold() -> None:
    engine, loader, optimizer, _ = train(2)
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert report.status == "holds", str(report)
    assert (report.settings.steps, report.settings.rate, report.settings.population) == (
        20,
        0.1,
        200,
    )
    assert report.epsilon == epsilon(1.0 * (1 - 1e-12), 1e-5, steps=20, sampling_rate=0.1)
    assert report.epsilon < report.settings.epsilon == engine.get_epsilon(1e-5)
    assert report.relation == "add-remove"


def test_shuffled_batches_are_broken_and_cost_one_release_per_epoch() -> None:
    engine, loader, optimizer, _ = train(2, poisson_sampling=False)
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    broken = [verdict.rule for verdict in report.verdicts if verdict.status == "broken"]
    assert broken == ["sampling", "stated epsilon"]
    assert report.epsilon == pytest.approx(gaussian_epsilon(2**0.5, 1e-5), rel=1e-6)
    assert report.relation == "zero-out"


def test_a_loop_over_the_original_loader_is_broken() -> None:
    engine, _, optimizer, raw = train(1)
    report = fedlgm.check.opacus(engine, raw, optimizer=optimizer, delta=1e-5)
    assert report.status == "broken"


def test_a_generator_of_the_callers() -> None:
    engine, loader, optimizer, _ = train(1, noise_generator=torch.Generator().manual_seed(0))
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert (report.status, "seed must be secret" in str(report)) == ("conditional", True)


def test_samplers_that_repeat_examples() -> None:
    engine, _, optimizer, _ = train(1)
    loader = DataLoader(DATA, batch_size=20, sampler=RandomSampler(DATA, num_samples=400))
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert (report.settings.sampler, report.missing) == (None, ("sampler",))
    assert report.epsilon == pytest.approx(gaussian_epsilon(10**0.5, 1e-5), rel=1e-6)
    loader = DataLoader(DATA, batch_size=20, sampler=RandomSampler(DATA, replacement=True))
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert (report.status, report.epsilon, report.rates) == ("broken", None, None)


def test_the_last_batch_is_dropped() -> None:
    """With 9 batches of 22 of 200 examples, the rate is that of 9 steps per epoch."""
    engine, loader, _, _ = train(1, batch_size=22, drop_last=True)
    report = fedlgm.check.opacus(engine, loader, delta=1e-5)
    assert report.status == "holds"
    assert report.settings.rate == pytest.approx(1 / 9)
    engine, loader, _, _ = train(3, batch_size=22, drop_last=True, poisson_sampling=False)
    report = fedlgm.check.opacus(engine, loader, accounted_as="none")
    assert (report.settings.steps, report.settings.participation_count) == (27, 3)


@pytest.mark.parametrize(
    ("options", "clipping"),
    [
        ({"clipping": "per_layer", "max_grad_norm": [1.0, 0.5]}, "unit"),
        (
            {
                "clipping": "adaptive",
                "target_unclipped_quantile": 0.5,
                "clipbound_learning_rate": 0.2,
                "max_clipbound": 10.0,
                "min_clipbound": 0.1,
                "unclipped_num_std": 5.0,
            },
            "adaptive",
        ),
    ],
)
def test_other_bounds(options: dict[str, Any], clipping: str) -> None:
    engine, loader, optimizer, _ = train(0, **options)
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5, epochs=1)
    assert (report.settings.clipping, report.settings.noise_multiplier) == (clipping, 1.0)
    assert report.status == ("holds" if clipping == "unit" else "conditional")
    if clipping == "adaptive":  # the sum, and a count of sensitivity 1
        exact = gaussian_epsilon((10 * (1 + 1 / 25)) ** 0.5, 1e-5)
        assert report.epsilon == pytest.approx(exact, rel=1e-6)


def test_the_central_limit_theorem_is_no_bound() -> None:
    engine, loader, _, _ = train(1, accountant="gdp")
    report = fedlgm.check.opacus(engine, loader, delta=1e-5)
    (verdict,) = [verdict for verdict in report.verdicts if verdict.rule == "accountant"]
    assert verdict.status == "conditional"


def test_before_the_first_step() -> None:
    engine, loader, optimizer, _ = train(0)
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5, epochs=2)
    assert (report.status, report.settings.steps, report.settings.releases) == ("holds", None, 20)
    report = fedlgm.check.opacus(engine, loader, delta=1e-5, epochs=2)
    assert (report.status, report.missing) == ("conditional", ("noise_multiplier",))


def test_steps_that_differ_count_as_the_worst_of_them() -> None:
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    history = [(2.0, 0.05, 10), (1.0, 0.1, 10), (2.0, 0.2, 10)]
    account = SimpleNamespace(history=history, mechanism=lambda: "rdp")
    engine = SimpleNamespace(accountant=account, get_epsilon=lambda delta: 100.0)
    poisson = UniformWithReplacementSampler(num_samples=100, sample_rate=0.1)
    loader = SimpleNamespace(dataset=range(100), sample_rate=0.1, batch_sampler=poisson)
    report = fedlgm.check.opacus(engine, loader, delta=1e-5)
    settings = report.settings
    assert (settings.noise_multiplier, settings.rate, settings.steps) == (1.0, 0.2, 30)


def test_an_accountant_that_counts_less_than_the_run() -> None:
    engine, loader, optimizer, _ = train(2)
    arguments: dict[str, Any] = {"optimizer": optimizer, "delta": 1e-5}
    honest = fedlgm.check.opacus(engine, loader, **arguments, epochs=2)
    assert honest.status == "holds", str(honest)
    short = fedlgm.check.opacus(engine, loader, **arguments, epochs=6)
    assert "accounted values" in broken(short)
    assert short.epsilon == epsilon(1.0 * (1 - 1e-12), 1e-5, steps=60, sampling_rate=0.1)
    for history in ([(1.5, 0.1, 20)], [(1.0, 0.05, 20)]):
        engine.accountant.history = history
        report = fedlgm.check.opacus(engine, loader, **arguments)
        assert {"accounted values", "stated epsilon"} == set(broken(report)), history
        assert report.epsilon == honest.epsilon


def test_an_optimizer_that_was_not_wrapped() -> None:
    engine, loader, _, _ = train(1)
    plain = torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), lr=0.1)
    report = fedlgm.check.opacus(engine, loader, optimizer=plain, delta=1e-5)
    assert (broken(report), report.epsilon, report.rates) == (["reading"], None, None)


def test_noise_that_a_schedule_raises_or_lowers() -> None:
    engine, loader, optimizer, _ = train(1)
    optimizer.noise_multiplier = 2.0  # of a step that has not been taken
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert (report.status, report.settings.noise_multiplier) == ("holds", 1.0)
    optimizer.noise_multiplier = 0.5
    report = fedlgm.check.opacus(engine, loader, optimizer=optimizer, delta=1e-5)
    assert (report.status, report.settings.noise_multiplier) == ("broken", 0.5)


def test_a_setting_cannot_replace_what_was_read() -> None:
    engine, loader, optimizer, _ = train(1)
    for name, value in (("population", 10), ("sampler", "shuffle"), ("noise_multiplier", 3.0)):
        with pytest.raises(ConfigError, match=f"{name} is .* in what was read, and"):
            fedlgm.check.opacus(engine, loader, optimizer=optimizer, **{name: value})


def test_objects_of_another_kind_are_refused() -> None:
    engine, loader, _, _ = train(0)
    with pytest.raises(ConfigError, match="the engine has no attribute 'accountant'"):
        fedlgm.check.opacus(object(), loader)
    with pytest.raises(ConfigError, match="the loader has no attribute 'dataset'"):
        fedlgm.check.opacus(engine, object())
    for history in ([1], [(1.0, 0.1, 1), (float("nan"), 0.1, 1)], None):
        account = SimpleNamespace(history=history, mechanism=lambda: "rdp")
        with pytest.raises(ConfigError, match="history must be a list"):
            fedlgm.check.opacus(SimpleNamespace(accountant=account), loader)
