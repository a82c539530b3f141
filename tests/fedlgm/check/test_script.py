"""Scripts are read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.check import Report, read_script
from fedlgm.errors import ConfigError

OPACUS = """
from opacus import PrivacyEngine
open("ran", "w")
BATCH = 32
SIGMA: float = 1.1
loader = DataLoader(data, batch_size=2 * BATCH, drop_last=True)
test_loader = DataLoader(other, batch_size=1000)
engine = PrivacyEngine()
model, optimizer, train_loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader,
    noise_multiplier=SIGMA, max_grad_norm=[1.0, 0.5], poisson_sampling=False,
)
print(engine.get_epsilon(delta=1e-5))
"""
FLOWER = """
strategy = FedAvg(fraction_train=0.1)
strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, clipping_norm=10, num_sampled_clients=20)
strategy.start(grid=grid, num_rounds=3)
"""
TENSORFLOW = """
train = dataset.shuffle(60000).batch(250)
optimizer = DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.3, num_microbatches=25)
print(compute_dp_sgd_privacy.compute_dp_sgd_privacy(60000, batch_size=250, noise_multiplier=1.3, epochs=15, delta=1e-5))
"""


def rules(report: Report, status: str) -> list[str]:
    return [verdict.rule for verdict in report.verdicts if verdict.status == status]


def test_a_script_of_opacus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = read_script(OPACUS, epochs=3, population=60_000)
    assert not list(tmp_path.iterdir())
    settings = report.settings
    assert (settings.noise_multiplier, settings.batch_size, settings.delta) == (1.1, 64, 1e-5)
    assert (settings.drop_last, settings.sampler) == (True, "shuffle")
    assert rules(report, "broken") == ["sampling"]
    assert rules(report, "conditional") == ["reading"]
    report = read_script(OPACUS.replace("poisson_sampling=False", "clipping='flat'"), epochs=3)
    assert (report.settings.sampler, report.settings.drop_last) == ("poisson", None)
    report = read_script(OPACUS.replace(", poisson_sampling=False", ""), epochs=3, population=1000)
    assert report.settings.rate == 1 / 15  # Opacus takes the rate from the loader's length
    assert rules(report, "broken") == []


def test_what_is_not_constant_is_not_read() -> None:
    script = OPACUS.replace("SIGMA: float = 1.1", "SIGMA = 1.1\nSIGMA = args.sigma")
    script = script.replace("poisson_sampling=False", "poisson_sampling=args.poisson, **extra")
    report = read_script(script, epochs=3, population=60_000)
    assert (report.settings.noise_multiplier, report.settings.sampler) == (None, None)
    assert {"noise_multiplier", "sampler"} <= set(report.missing)
    said = [verdict.why for verdict in report.verdicts if verdict.rule == "reading"]
    assert said[1:] == [
        "Line 10: the arguments **extra are not read.",
        "Line 12: noise_multiplier = SIGMA could not be read.",
        "Line 12: poisson_sampling = args.poisson could not be read.",
    ]


def test_a_name_that_a_function_or_loop_changes_is_not_constant() -> None:
    for change in (
        "for SIGMA in (1, 2): pass",
        "def f(SIGMA): pass",
        "from x import SIGMA",
        "SIGMA += 1",
        "[0 for SIGMA in range(3)]",
        "del SIGMA",
        "with a as SIGMA: pass",
        "(SIGMA := 3)",
        "class SIGMA: pass",
        "def SIGMA(): pass",
        "from settings import *",
    ):
        report = read_script(f"{OPACUS}\n{change}\n", epochs=3)
        assert report.settings.noise_multiplier is None, change


def test_a_generator_of_the_script() -> None:
    report = read_script("engine.make_private(noise_multiplier=1.0, noise_generator=seeded)")
    assert "whose seed must be secret" in str(report)


LOOP = """
loader = DataLoader(data, batch_size=100)
engine = PrivacyEngine()
model, optimizer, private = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
for epoch in range(3):
    for x, y in private:
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", []),
        ("engine = ", "engine.accountant.history = []\nengine = ", ["scope"]),
        ("for epoch", "engine.accountant.history.clear()\nfor epoch", ["scope"]),
        ("for epoch", "engine.accountant = RDPAccountant()\nfor epoch", ["scope"]),
        ("for epoch", "while True: engine.make_private\nfor epoch", []),
        ("loader = ", "torch.manual_seed(3)\nloader = ", ["mechanism"]),
        ("loader = ", "data.manual_seed(3)\nloader = ", []),
        ("loader = ", "torch.random.manual_seed(3)\nloader = ", ["mechanism"]),
        ("loader = ", "torch.default_generator.manual_seed(3)\nloader = ", ["mechanism"]),
        ("loader = ", "accelerate.utils.set_seed(3)\nloader = ", ["mechanism"]),
        ("loader = ", "torch.manual_seed(args.seed)\nloader = ", []),
        ("loader = ", "set_seed(3)\nloader = ", ["mechanism"]),
        ("PrivacyEngine()", "PrivacyEngine(secure_mode=args.secure); torch.manual_seed(3)", []),
        ("PrivacyEngine()", "PrivacyEngine(secure_mode=True); torch.manual_seed(3)", []),
        ("loader = ", "criterion = nn.CrossEntropyLoss(reduction='sum')\nloader = ", ["clipping"]),
        ("loader = ", "criterion = nn.CrossEntropyLoss(reduction='mean')\nloader = ", []),
        ("noise_mult", "loss_reduction='sum', noise_mult", []),
        ("criterion(model(x), y)", "F.nll_loss(model(x), y, reduction='sum')", ["clipping"]),
        ("loader = ", "test = F.nll_loss(model(x), y, reduction='sum')\nloader = ", []),
        ("loader = ", "model = Sequential(nn.BatchNorm2d(3))\nloader = ", ["clipping"]),
        ("loader = ", "model = ModuleValidator.fix(nn.BatchNorm2d(3))\nloader = ", []),
        ("in private", "in tqdm(enumerate(loader))", ["sampling"]),
        ("    for x", "    with BatchMemoryManager(data_loader=loader) as private:\n      for x",
         ["sampling"]),
        ("model, optimizer, private", "model, other, private", ["reading"]),
        ("optimizer.step()", "optimizer.original_optimizer.step()", ["reading"]),
        ("for epoch", "plain = optimizer.original_optimizer\nfor epoch", []),
        ("loader = ", "second = Adam(x)\nloader = ", []),
        ("        optimizer.step()", "        optimizer.step()\n        second.step()", []),
        ("loader = ", "second = Adam(x)\nfor x in y: second.step()\nloader = ", []),
        ("        optimizer.step()", "        optimizer.step()\n    scheduler.step()", []),
    ],
)  # fmt: skip
def test_what_surrounds_opacus(old: str, new: str, expected: list[str]) -> None:
    text = LOOP.replace(old, new, 1)
    assert (text == LOOP) == (old == new)
    report = read_script(text, population=10_000, delta=1e-5)
    assert rules(report, "broken") == expected, str(report)
    assert report.settings.epochs == 3


@pytest.mark.parametrize(("losses", "status"), [(0, "broken"), (1, "conditional")])
def test_a_second_optimizer(losses: int, status: str) -> None:
    """It steps by the private loss, or by a loss of its own, as that of a generator may."""
    text = "second = torch.optim.Adam(x)\n" + LOOP + "        fake.backward()\n" * losses
    report = read_script(f"{text}        second.step()\n", population=10_000, delta=1e-5)
    assert (report.status, report.epsilon, report.rates) == (status, None, None)


def test_a_sampler_of_the_scripts() -> None:
    text = LOOP.replace("batch_size=100", "batch_size=100, sampler=WeightedRandomSampler(w, 500)")
    assert read_script(text, population=10_000, delta=1e-5).epsilon is not None
    for old, new in (("noise_m", "poisson_sampling=False, noise_m"), ("in private", "in loader")):
        report = read_script(text.replace(old, new), population=10_000, delta=1e-5)
        assert (report.status, report.epsilon) == ("broken", None)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", ["sampling"]),
        ("sampler=None", "batch_sampler=UniformWithReplacementSampler(n, q)", []),
        ("engine.attach(optimizer)", "", ["mechanism", "sampling"]),
        ("sample_rate=0.01", "sample_rate=0.001", ["sampling", "accounted values"]),
    ],
)
def test_an_engine_that_is_attached(old: str, new: str, expected: list[str]) -> None:
    text = """
loader = DataLoader(data, batch_size=100, sampler=None)
engine = PrivacyEngine(model, sample_rate=0.01, alphas=[2, 4, 8, 16, 32, 64],
    noise_multiplier=1.3, max_grad_norm=1.0)
engine.attach(optimizer)
for epoch in range(5):
    for x, y in loader:
        loss(model(x), y).backward()
        optimizer.step()
"""
    settings = {"population": 10_000, "batch_size": 100, "delta": 1e-5}
    assert rules(read_script(text.replace(old, new), **settings), "broken") == expected


def test_a_functions_parameter_is_what_its_callers_give() -> None:
    function = """
def train(model, optimizer, loader):
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
"""
    start = LOOP[: LOOP.index("    for x")].replace("model, optimizer, private", "net, dp, private")
    for arguments, expected in (
        ("net, dp, private", []),
        ("net, optimizer=dp, loader=private", []),
        ("net, optimizer, private", ["reading"]),
        ("net, dp, loader=loader", ["sampling"]),
    ):
        text = f"{function}{start}    train({arguments})\n"
        report = read_script(text, population=10_000, delta=1e-5)
        assert rules(report, "broken") == expected, arguments


@pytest.mark.parametrize(
    "loop",
    [
        "for epoch in range(3):\n    {}",
        "while x:\n    {}",
        "def step():\n    {}\nfor i in range(3): step()",
        "class Client(fl.client.NumPyClient):\n  def fit(self, parameters, config):\n    {}",
        "@app.train()\ndef train(message, context):\n    {}",
        "results = [{} for seed in range(3)]",
    ],
)
def test_an_engine_that_is_made_again_forgets(loop: str) -> None:
    call = "PrivacyEngine().make_private(noise_multiplier=1.0, max_grad_norm=1.0)"
    assert rules(read_script(loop.format(call)), "broken") == ["scope"]
    assert rules(read_script(loop.format(call), runs=3, search_charged=True), "broken") == []
    assert rules(read_script(f"def main():\n    {call}\nmain()"), "broken") == []


def test_noise_that_changes_is_not_read() -> None:
    for change in (
        "optimizer.noise_multiplier = 0.5",
        "s = ExponentialNoise(optimizer, gamma=0.9)",
    ):
        report = read_script(f"{LOOP}\n{change}\n", population=10_000, delta=1e-5)
        assert "noise_multiplier" in report.missing


def test_a_setting_that_contradicts_the_script_is_refused() -> None:
    for text, name, value in (
        (LOOP, "batch_size", 10),
        (LOOP, "epochs", 1),
        (FLOWER, "rounds", 50),
        (FLOWER, "noise_multiplier", 2.0),
        (TENSORFLOW, "sampler", "poisson"),
        (TENSORFLOW, "epochs", 1),
    ):
        with pytest.raises(ConfigError, match=r"in what was read, and .* leave out the wrong one"):
            read_script(text, **{name: value})
    with pytest.raises(ConfigError, match="poisson_sampling is false"):
        read_script(OPACUS, sampler="poisson")


def test_an_optimizer_that_the_script_wraps() -> None:
    text = """
loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=500))
optimizer = DPOptimizer(optimizer=SGD(p), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=500)
for x, y in loader:
    optimizer.step()
    accountant.step(noise_multiplier=1.0, sample_rate=0.01)
"""
    settings = {"population": 50_000, "epochs": 10, "delta": 1e-6}
    assert rules(read_script(text, **settings), "broken") == []
    few = read_script(text.replace("0.01", "0.001"), **settings)
    assert rules(few, "broken") == ["accounted values"]
    shuffled = read_script(text.replace("DPDataLoader.from_data_loader", "wrap"), **settings)
    assert rules(shuffled, "broken") == ["sampling"]


def test_any_optimizer_of_tensorflow_privacy_shows_its_noise() -> None:
    text = TENSORFLOW.replace("DPKerasSGDOptimizer", "make(Adam)").replace("1.3, num", "0.5, num")
    assert "accounted values" in rules(read_script(text), "broken")


def test_noise_for_an_unknown_number_of_clients_has_no_figure() -> None:
    text = FLOWER.replace("num_sampled_clients=20", "num_sampled_clients=len(clients)")
    report = read_script(text, population=200, delta=1e-5, weights="uniform")
    assert (report.status, report.epsilon, report.rates) == ("conditional", None, None)
    assert "noise_size" in report.missing


@pytest.mark.parametrize(
    ("app", "status"),
    [
        ("app = ClientApp(mods=[fixedclipping_mod])", "conditional"),
        ("mods = [fixedclipping_mod]\napp = ClientApp(client_fn, mods=mods)", "conditional"),
        ("", "conditional"),
        ("app = ClientApp(client_fn, mods=[secaggplus_mod])", "broken"),
    ],
)
def test_clients_bound_their_updates_with_a_mod(app: str, status: str) -> None:
    text = f"{FLOWER.replace('ServerSide', 'ClientSide')}\n{app}\n"
    report = read_script(text, population=200, delta=1e-5, weights="uniform")
    assert (report.status, report.epsilon is None) == (status, status == "broken")


def test_a_script_of_flower() -> None:
    report = read_script(FLOWER, population=200, delta=1e-5)
    settings = report.settings
    assert (settings.steps, settings.batch_size, settings.clip) == (3, 20, 10.0)
    assert rules(report, "broken") == ["weights"]
    report = read_script("LocalDpMod(1.0, 2.0, 1.0, 1e-5)", rounds=4, population=1000)
    assert rules(report, "broken") == ["scope", "stated epsilon"]


def test_a_script_of_tensorflow_privacy() -> None:
    report = read_script(TENSORFLOW)
    assert (report.settings.sampler, report.settings.clipping) == ("shuffle", "microbatch")
    assert rules(report, "broken") == ["sampling", "clipping"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("x = (", "is not Python"),
        ("x = '\0'", "is not Python"),
        ("train()", "got none"),
        (FLOWER * 2, "lines 3, 7"),
        ("engine.make_private(noise=1.0)", "unknown argument 'noise'"),
        ("LocalDpMod(1.0, 2.0, args.epsilon, 1e-5)", "arguments that cannot be read"),
        ("engine.make_private(noise_multiplier=1e999)", "noise_multiplier must be finite"),
        ("engine.make_private(noise_multiplier='1')", "noise_multiplier must be a number"),
    ],
)
def test_what_cannot_be_checked_is_refused(script: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_script(script)
