"""Centralised DP-SGD: real training, one event per step, and nothing private in the plans."""

from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, LedgerError, PrivacyError
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalSteps, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.trainer import ExampleTrainer
from fedlgm.training.example_level.trial import TRIED


def digits():
    found = load_digits()
    x, y = torch.tensor(found.data / 16.0, dtype=torch.float32), torch.tensor(found.target)
    return x[:1200], y[:1200], x[1200:], y[1200:]


def run(tmp_path, steps=60, rate=0.1, epsilon=8.0, name="dp-sgd", accountant="rdp", **options):
    x, y, test_x, test_y = digits()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
    facts = RunFacts(
        0.0,
        Sampling("poisson", len(y), rate),
        rounds=steps,
        epsilon=epsilon,
        delta=1e-5,
        accountant=accountant,
    )
    method = Method.of(model, mechanisms.get(name, **options), facts)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        result = train(model, x, y, method, keys=KeyRing.from_seed(3), ledger=ledger, lr=2.0)
    return result, float((model(test_x).argmax(1) == test_y).float().mean())


@pytest.mark.parametrize(
    "options",
    [
        {"style": "flat", "accountant": "pld"},
        {"style": "per-layer", "allocation": "snr-consistent"},
        {"name": "auto-s"},
        {"name": "dp-psac", "stabiliser": 0.1},
    ],
)
def test_every_style_learns_within_its_budget(tmp_path, options):
    result, accuracy = run(tmp_path, **options)
    assert accuracy > 0.75
    assert 7.0 < result.epsilon <= 8.0
    assert result.guarantee.unit == "example"
    assert result.guarantee.status == "proven"


def test_empty_batches_are_steps_like_any_other(tmp_path):
    result, _ = run(tmp_path, steps=3, rate=1e-5, epsilon=1.0)
    assert result.steps == 3
    assert torch.isfinite(result.model).all()


def test_without_keys_batches_and_noise_are_secret_and_differ(tmp_path):
    trained = []
    for name in ("first", "second"):
        facts = RunFacts(0.0, Sampling("poisson", 20, 0.5), rounds=1, epsilon=1.0, delta=1e-2)
        model = torch.nn.Linear(1, 2)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        method = Method.of(model, mechanisms.get("dp-sgd"), facts)
        x, y = torch.linspace(-1, 1, 20)[:, None], torch.arange(20) // 10
        with Ledger(tmp_path / f"{name}.sqlite", "run") as ledger:
            trained.append(train(model, x, y, method, ledger=ledger, lr=0.5))
    assert not any(run.noise_reproducible for run in trained)
    assert not torch.equal(trained[0].model, trained[1].model)


def test_a_mechanism_that_bounds_clients_is_refused(tmp_path):
    model = torch.nn.Linear(4, 2)
    facts = RunFacts(
        0.0, Sampling("poisson", 10, 0.5), rounds=2, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    x, y = torch.zeros(10, 4), torch.zeros(10, dtype=torch.int64)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        method = Method.of(model, mechanisms.get("snr-consistent"), facts)
        with pytest.raises(ConfigError, match="bounds whole clients"):
            train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)
        method = Method.of(model, mechanisms.get("dp-sgd"), facts)
        with pytest.raises(ConfigError, match="count 10 examples, but the data have 9"):
            train(model, x[:9], y[:9], method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)


def test_steps_on_examples_are_not_called_user_level(tmp_path):
    """A user's examples each keep the bound, so together they move the sum by more than is
    charged."""
    x, y = torch.linspace(-1, 1, 10)[:, None], torch.arange(10) // 5
    model = torch.nn.Linear(1, 2)
    facts = RunFacts(
        0.0, Sampling("poisson", 10, 0.5, of="user"), rounds=2, epsilon=1.0, delta=1e-2
    )
    method = Method.of(model, mechanisms.get("dp-sgd"), facts)
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        with pytest.raises(PrivacyError, match="a trainer bounds single examples"):
            train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)
        assert ledger.position() == 0


def test_only_what_is_drawn_is_charged(tmp_path):
    """Local steps are charged at their own rate, and a step of `train` draws at that of the facts:
    42 instead of 4."""
    x, y = torch.linspace(-1, 1, 10)[:, None], torch.arange(10) // 5
    budget = {"rounds": 8, "epsilon": 4.0, "delta": 1e-2, "accountant": "rdp"}
    facts = RunFacts(
        0.0, Sampling("poisson", 10, 0.5), trust="local", steps=LocalSteps(1, 0.01, 32.0), **budget
    )
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        model = torch.nn.Linear(1, 2)
        method = Method.of(model, mechanisms.get("dp-sgd"), facts)
        with pytest.raises(
            ConfigError, match="needs facts with sampling 'poisson' and trust = 'central'"
        ):
            train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=1.0)
        assert ledger.position() == 0


@pytest.fixture
def batches(monkeypatch):
    """Targets of the batches that trainers take, but for those of trials."""
    taken, take = [], ExampleTrainer._batch

    def seen(trainer, x, y, rows):
        batch = take(trainer, x, y, rows)
        if len(set(batch[1].tolist())) > TRIED:
            taken.append(tuple(batch[1].tolist()))
        return batch

    monkeypatch.setattr(ExampleTrainer, "_batch", seen)
    return taken


class _Parity:
    """Losses of an own task, for whether the target is odd."""

    def losses(self, outputs, y):
        return torch.nn.functional.cross_entropy(outputs, y % 2, reduction="none")


def test_a_step_at_other_weights_draws_its_own_batch(tmp_path, batches):
    """Two releases of one draw are not amplified twice, as the ledger counts them."""
    x, y = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), torch.arange(200)
    facts = RunFacts(
        0.0, Sampling("poisson", 200, 0.2), rounds=3, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    keys, seen = KeyRing.from_seed(None), []
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        for lr in (1.0, 1.0, 0.5):
            torch.manual_seed(0)
            model, task = torch.nn.Linear(4, 2), _Parity()
            method = Method.of(model, mechanisms.get("dp-sgd"), facts)
            train(
                model,
                x,
                y,
                method,
                keys=keys,
                ledger=ledger,
                lr=lr,
                task=task,
                continue_ledger=True,
            )
            seen.append(tuple(batches))
            batches.clear()
        assert seen[0] == seen[1] != seen[2]
        assert seen[0][0] == seen[2][0]  # the first step is the same release
        assert ledger.position() == 3 + 2


def test_trainings_on_two_ledgers_draw_their_own_batches(tmp_path, batches):
    """Each ledger counts sampling once for its training, so both together must not have one
    draw."""
    x, y = torch.randn(200, 4, generator=torch.Generator().manual_seed(0)), torch.arange(200)
    facts = RunFacts(
        0.0, Sampling("poisson", 200, 0.2), rounds=1, epsilon=8.0, delta=1e-3, accountant="rdp"
    )
    keys, seen = KeyRing.from_seed(None), []
    for name in ("one", "other", "one"):
        with Ledger(tmp_path / f"{name}.sqlite", "run") as ledger:
            torch.manual_seed(0)
            model, task = torch.nn.Linear(4, 2), _Parity()
            method = Method.of(model, mechanisms.get("dp-sgd"), facts)
            train(
                model,
                x,
                y,
                method,
                keys=keys,
                ledger=ledger,
                lr=1.0,
                task=task,
                continue_ledger=True,
            )
            assert ledger.position() == 1
            seen.append(tuple(batches))
            batches.clear()
    assert seen[0] == seen[2] != seen[1]


def test_two_trainings_on_one_ledger_are_both_charged(tmp_path):
    """Also by one public seed, which gives both the same noise; made again, a training is the same
    releases."""
    x, y, _, _ = digits()
    facts = RunFacts(
        0.0, Sampling("poisson", len(y), 0.1), rounds=3, epsilon=2.0, delta=1e-5, accountant="rdp"
    )
    spent = []
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        for lr, targets in ((1.0, y), (1.0, y), (1.0, y.flip(0)), (2.0, y)):
            torch.manual_seed(0)
            model = torch.nn.Linear(64, 10)
            method = Method.of(model, mechanisms.get("dp-sgd"), facts)
            train(
                model,
                x,
                targets,
                method,
                keys=KeyRing.from_seed(3),
                ledger=ledger,
                lr=lr,
                continue_ledger=True,
            )
            spent.append(ledger.position())
    assert spent == [3, 3, 6, 8]  # another learning rate changes what the second step releases


def test_a_seeded_training_says_that_its_noise_can_be_drawn_again(tmp_path):
    result, _ = run(tmp_path, steps=2, style="flat")
    assert repr(result).startswith("Trained(2410 weights, 2 steps: epsilon ")
    assert "proven; simulation: the seed is public" in repr(result)
    assert "simulation" not in repr(replace(result, noise_reproducible=False))


class Doubled:
    """A loss whose clipped gradients are those of cross-entropy, but for rounding."""

    def __init__(self, factor):
        self.factor = factor

    def losses(self, outputs, targets):
        return self.factor * torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def test_trainings_that_draw_one_batch_are_not_amplified_twice(tmp_path):
    """Twenty losses tried with one ring were charged epsilon 0.45; their first steps together cost
    18."""
    x, y, *_ = digits()
    facts = RunFacts(1.0, Sampling("poisson", len(y), 0.05), rounds=2, epsilon=8.0, delta=1e-5)
    keys, charged = KeyRing.from_seed(None), []
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:
        for factor in (3.0, 3.3, 3.3, 3.0):
            model = torch.nn.Linear(64, 10)
            torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
            method = Method(mechanisms.get("dp-sgd"), LayerTable.from_module(model), facts)
            train(
                model,
                x,
                y,
                method,
                keys=keys,
                ledger=ledger,
                lr=0.1,
                task=Doubled(factor),
                continue_ledger=True,
            )
            charged.append(
                [type(charge.event).__name__ for charge in ledger.charges() if charge.round == 1]
            )
        assert {
            type(charge.event).__name__ for charge in ledger.charges() if charge.round == 2
        } == {charged[0][0]}
    assert charged[0] == ["PoissonSampledDpEvent"]
    assert sorted(charged[1]) == ["GaussianDpEvent", "PoissonSampledDpEvent"]
    assert charged[3] == charged[2] == charged[1]  # both trainings again


def test_a_second_training_on_a_ledger_is_refused_unless_it_is_meant(tmp_path):
    """Run again, a script would train from scratch at twice the cost."""
    x, y, _, _ = digits()
    with Ledger(tmp_path / "ledger.sqlite", "run") as ledger:

        def again(**options):
            model = torch.nn.Linear(64, 10)
            facts = RunFacts(
                0.0, Sampling("poisson", len(y), 0.1), rounds=2, epsilon=2.0, delta=1e-5
            )
            method = Method.of(model, mechanisms.get("dp-sgd"), facts)
            return train(
                model, x, y, method, keys=KeyRing.from_seed(None), ledger=ledger, lr=1.0, **options
            )

        again()
        with (
            Ledger(tmp_path / "ledger.sqlite", "run") as other,
            other.hold(),
            pytest.raises(LedgerError, match="another run is charging the ledger"),
        ):
            again(continue_ledger=True)
        with pytest.raises(
            LedgerError, match=r"holds 2 rounds \(epsilon 2\); .* bring it to 2\.\d+, above 2: name"
        ):
            again()
        assert ledger.position() == 2
        assert again(continue_ledger=True).epsilon > 2.2


def weights_after(ledger, steps=6, **options):
    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    budget = {"epsilon": 8.0, "delta": 1e-3, "accountant": "rdp"}
    facts = RunFacts(0.0, Sampling("poisson", 40, 0.5), rounds=steps, **budget)
    method = Method.of(model, mechanisms.get("dp-sgd"), facts)
    with Ledger(ledger, "run") as book:
        trained = train(model, x, y, method, keys=KeyRing.from_seed(3), ledger=book, **options)
    return trained


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"momentum": 0.9}, lambda w: torch.optim.SGD([w], lr=0.5, momentum=0.9)),
        ({"optimizer": "adam"}, lambda w: torch.optim.Adam([w], lr=0.5)),
        (
            {"optimizer": "adam", "weight_decay": 0.1},
            lambda w: torch.optim.AdamW([w], lr=0.5, weight_decay=0.1),
        ),
    ],
)
def test_steps_are_those_of_torchs_optimizers_and_change_no_epsilon(tmp_path, options, step):
    """Both see the same released gradients: the first is that of plain SGD."""
    plain = weights_after(tmp_path / "plain.sqlite", steps=1, lr=0.5)
    trained = weights_after(tmp_path / "first.sqlite", steps=1, lr=0.5, **options)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    start = LayerTable.from_module(model).flatten(model)
    weights = start.clone().requires_grad_()
    optimizer = step(weights)
    weights.grad = (start - plain.model) / 0.5
    optimizer.step()
    torch.testing.assert_close(trained.model, weights.detach(), rtol=1e-4, atol=1e-5)
    longer = [
        weights_after(tmp_path / f"{i}.sqlite", lr=0.5, **each)
        for i, each in enumerate(({}, options))
    ]
    assert longer[0].epsilon == longer[1].epsilon
    assert not torch.equal(longer[0].model, longer[1].model)


def test_a_schedule_scales_the_rate_of_every_step(tmp_path):
    """One step of a schedule that begins at 1 is a plain step; later ones are smaller."""
    results = [
        weights_after(tmp_path / f"{i}.sqlite", lr=0.5, steps=steps, schedule=schedule).model
        for i, (steps, schedule) in enumerate(((1, None), (1, "linear"), (6, None), (6, "linear")))
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[2], results[3])


def test_unknown_settings_of_the_step_are_refused(tmp_path):
    for options, said in (
        ({"momentum": 0.9, "optimizer": "adam"}, "'adam' has its own"),
        ({"schedule": "cosin"}, "cosine"),
        ({"weight_decay": 4.0}, "must lie between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            weights_after(tmp_path / "ledger.sqlite", lr=0.5, **options)
