"""Coordinate descent and PCA through the federation: as the central computation, accounted, on the
command line."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedlgm.errors import ConfigError, PrivacyError, RunError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import SAFETY
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import ClientTask
from fedlgm_lab.applications import coordinate_descent as cd
from fedlgm_lab.applications import pca
from fedlgm_lab.applications import runs as applications
from fedlgm_lab.applications.datasets import fully_random_rows, load_tabular
from fedlgm_lab.applications.federated_descent import (
    CoordinateRelease,
    CoordinateSums,
    ProximalStep,
    coordinate_table,
)
from fedlgm_lab.applications.federated_pca import (
    CovarianceRelease,
    CovarianceSums,
    covariance_table,
    pack,
    unpack,
)
from fedlgm_lab.applications.objectives import Lasso, Logistic
from fedlgm_lab.applications.settings import DescentSettings, PcaSettings
from fedlgm_lab.applications.smoothness import smoothness
from simulations import cli
from simulations.config import recipe
from strategies import ServerOptimizer

KEYS = KeyRing.from_seed(3)
TASKS = {"diabetes": Lasso(0.02), "breast-cancer": Logistic(0.02)}


def descent(**values):
    return DescentSettings.load("coordinate-descent", None, values)


def components(**values):
    return PcaSettings.load("pca", None, values)


def descent_plan(x, objective, **changes):
    arguments = {
        "budget": 0.5,
        "rule": "spr",
        "clip": 1.0,
        "rate": 0.5,
        "passes": 3,
        "rows": len(x),
    } | changes
    return cd.plan_descent(smoothness(objective, x), **arguments)


def quiet(plan):
    """The same plan with noise far below float32, so that only the arithmetic shows."""
    return replace(plan, noise=np.full(plan.noise.size, 1e-12))


def run_descent(x, y, objective, plan, clients, tmp_path, keys=KEYS):
    path = []
    with Ledger(tmp_path / "ledger.sqlite", owner="test") as ledger:
        _, last = applications.federate(
            CoordinateRelease("descent", descent=plan),
            CoordinateSums(objective, plan),
            coordinate_table(x.shape[1]),
            applications.RowSource.deal(x, y, clients, KEYS),
            ProximalStep(objective, plan, clients),
            rounds=plan.passes * x.shape[1],
            relation=plan.guarantee.relation,
            keys=keys,
            ledger=ledger,
            on_model=lambda round_, theta: path.append(theta.double().numpy()),
        )
        return np.array(path)[x.shape[1] - 1 :: x.shape[1]], last, ledger.epsilon(1e-5)


def covariance_vector(x, plan, clients, tmp_path, keys=KEYS):
    layers = covariance_table(plan)
    with Ledger(tmp_path / f"{keys.root}.sqlite", owner="test") as ledger:
        vector, last = applications.federate(
            CovarianceRelease("pca", covariance=plan),
            CovarianceSums(plan),
            layers,
            applications.RowSource.deal(x, np.zeros(len(x)), clients, KEYS),
            ServerOptimizer("sgd", float(clients)),
            rounds=1,
            relation="add-remove",
            keys=keys,
            ledger=ledger,
        )
        return vector, last, ledger.epsilon(0.0 if plan.family == "laplace" else 1e-6)


def covariance(method, dimension, epsilon=1.0):
    return pca.covariance_plan(
        method, dimension, epsilon, 0.0 if method.startswith("laplace") else 1e-6
    )


# --- coordinate descent --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [1, 7])
@pytest.mark.parametrize("name", TASKS)
def test_federated_descent_is_the_central_one_when_noise_is_off(name, clients, tmp_path):
    data, objective = load_tabular(name), TASKS[name]
    plan = quiet(descent_plan(data.features, objective))
    central = cd.descend(
        objective, data.features, data.targets, plan, KEYS.numpy_generator(Purpose.NOISE)
    )[1:]
    path, _, _ = run_descent(data.features, data.targets, objective, plan, clients, tmp_path)
    assert path == pytest.approx(central, rel=1e-4, abs=1e-4 * np.abs(central).max())
    assert np.abs(central).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_federated_noise_has_the_law_of_the_central_one(family, tmp_path):
    x, y, objective = (
        np.zeros((40, 3)),
        np.zeros(40),
        Lasso(0.0),
    )  # no signal: theta moves by noise alone
    x[0] = [0.1, 1.0, 3.0]
    plan = descent_plan(x, objective, family=family, passes=200, rule="inid")
    x = np.zeros_like(x)
    path, _, _ = run_descent(x, y, objective, plan, 4, tmp_path)
    steps = np.diff(np.concatenate([np.zeros((1, 3)), path]), axis=0)
    law = {"gaussian": stats.norm, "laplace": stats.laplace}[family]
    for i, scale in enumerate(plan.noise * plan.rates / plan.rows):
        assert stats.kstest(steps[:, i], law(scale=scale).cdf).pvalue > 1e-6
        assert stats.kstest(steps[:, i], law(scale=2 * scale).cdf).pvalue < 1e-3
    assert abs(np.corrcoef(steps.T) - np.eye(3)).max() < 5 / np.sqrt(len(steps))


@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
@pytest.mark.parametrize("rule", ["inid", "spr", "iid"])
def test_the_ledger_charges_what_the_central_plan_costs(rule, relation, tmp_path):
    x = load_tabular("diabetes").features[:, :4]
    budget = cd.pass_budget("gaussian", 1.0, 1e-5, 3)
    plan = descent_plan(x, Lasso(0.1), budget=budget, rule=rule, relation=relation)
    _, last, epsilon = run_descent(x, x[:, 0], Lasso(0.1), plan, 3, tmp_path)
    assert epsilon == pytest.approx(1.0, rel=1e-3)
    assert (last.guarantee.unit, last.guarantee.relation, last.denominator) == (
        "example",
        relation,
        3,
    )


@pytest.mark.parametrize("rule", ["inid", "spr", "iid"])
def test_laplace_descent_is_pure(rule):
    result = applications.coordinate_descent(
        descent(family="laplace", rule=rule, passes=2, epsilon=0.7)
    )
    assert result["delta"] == 0
    assert result["epsilon"] == pytest.approx(0.7, rel=1e-6)
    assert result["epsilon"] == result["claimed_epsilon"]


def test_iid_noise_is_equal_on_all_updates_and_costs_the_pass():
    plan = descent_plan(
        load_tabular("diabetes", scaling="centered").features, Lasso(0.1), rule="iid"
    )
    assert plan.noise * plan.rates == pytest.approx((plan.noise * plan.rates)[0])
    assert np.linalg.norm(2 * plan.clip / plan.noise) == pytest.approx(0.5)


rows = hnp.arrays(np.float64, (5, 3), elements=st.floats(-1e3, 1e3))


@given(rows, hnp.arrays(np.float64, 3, elements=st.floats(-10, 10)))
def test_one_row_moves_a_clients_sums_by_its_bounds(x, theta):
    plan = descent_plan(np.ones((5, 3)), Logistic(0.1), clip=0.7)
    trainer, model = CoordinateSums(Logistic(0.1), plan), torch.from_numpy(theta.astype(np.float32))

    def total(table, y):
        task = ClientTask(torch.from_numpy(table), torch.from_numpy(y), torch.Generator(), 1)
        return next(trainer.updates(model, [task])).values[0].numpy()

    y = np.ones(5)
    assert np.all(np.abs(total(x, y) - total(x[1:], y[1:])) <= plan.clip)
    assert np.all(np.abs(total(x, y) - total(x, np.array([-1.0, 1, 1, 1, 1]))) <= 2 * plan.clip)
    x[2] = np.nan
    assert np.isfinite(total(x, y)).all()


def test_a_round_releases_one_coordinate_only():
    plan = descent_plan(np.ones((5, 3)), Lasso(0.1))
    layers = coordinate_table(3)
    budget = RunFacts(0.0, Sampling("poisson", 4, 1.0), "replace-one", rounds=9)
    mechanism = CoordinateRelease("descent", descent=plan)
    for round_ in range(5):
        planned = mechanism.plan(layers, budget, Transcript(round_, (torch.zeros(3),)))
        assert planned.indices.tolist() == [round_ % 3]
        assert planned.size == 1
        assert planned.sigma[round_ % 3] == plan.noise[round_ % 3]


def test_without_noise_there_is_no_guarantee(tmp_path):
    plan = replace(descent_plan(np.ones((5, 3)), Lasso(0.1)), noise=np.zeros(3))
    with pytest.raises(PrivacyError, match="without noise"):
        run_descent(np.ones((5, 3)), np.ones(5), Lasso(0.1), plan, 2, tmp_path)


# --- principal components --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", pca.methods())
def test_federated_covariance_is_the_central_one_when_noise_is_off(method, tmp_path):
    x, _ = fully_random_rows(12, 3, 100, KEYS.numpy_generator(Purpose.PROBE))
    plan = covariance(method, 12)
    total = pca.covariance_sum(x, plan)
    tiny = replace(plan, diagonal=1e-9 * plan.diagonal, off_diagonal=1e-9 * plan.off_diagonal)
    vector, _, _ = covariance_vector(x, tiny, 7, tmp_path)
    assert unpack(vector, plan) == pytest.approx(
        SAFETY * total, abs=1e-5
    )  # clients' sums are cut short by 2^-16
    assert unpack(pack(total, plan), plan) == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("method", pca.methods())
def test_federated_covariance_noise_and_cost_are_the_plans(method, tmp_path):
    size = 150
    plan = covariance(method, size)
    vector, last, epsilon = covariance_vector(np.zeros((5, size)), plan, 3, tmp_path)
    matrix = unpack(vector, plan)
    law = {"gaussian": stats.norm, "laplace": stats.laplace}[plan.family]
    assert np.array_equal(matrix, matrix.T)
    for entries, scale in (
        (np.diag(matrix), plan.diagonal),
        (matrix[np.triu_indices(size, 1)], plan.off_diagonal),
    ):
        assert stats.kstest(entries, law(scale=scale).cdf).pvalue > 1e-6
        assert stats.kstest(entries, law(scale=3 * scale).cdf).pvalue < 1e-3
    if plan.guarantee.status == "none":
        assert epsilon == math.inf
    else:
        assert epsilon == pytest.approx(1.0, rel=1e-3)
        assert last.guarantee.unit == "example"


@given(hnp.arrays(np.float64, 6, elements=st.floats(-3, 3)))
def test_a_row_never_spends_more_than_the_released_plan_says(row):
    for method in pca.methods():
        plan = covariance(method, 6)
        if plan.guarantee.status == "none":
            continue
        layers = covariance_table(plan)
        budget = RunFacts(0.0, Sampling("poisson", 4, 1.0), rounds=1)
        start = Transcript.start(torch.zeros(layers.size))
        released = CovarianceRelease("pca", covariance=plan).plan(layers, budget, start)
        moved = pack(pca.covariance_sum(row[None], plan), plan)
        ratios = np.repeat(released.sigma, layers.sizes)
        order = 2 if plan.family == "gaussian" else 1
        spent = np.linalg.norm(moved.double().numpy() / ratios, ord=order)
        assert spent <= 1 / released.effective_multiplier * (1 + 1e-6)


def test_pca_finds_the_subspace_and_the_budget_matters():
    errors = [
        applications.principal_components(components(epsilon=epsilon))["diagnostics"][
            "recovery_error"
        ]
        for epsilon in (0.2, 1.0, 20.0)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.05
    result = applications.principal_components(components(data="digits", epsilon=4.0, rank=5))
    assert result["diagnostics"]["variance_kept"] > 0.95
    assert (result["guarantee_status"], result["dimension"]) == ("conditional", 64)
    assert "the number of rows is public" in result["guarantee"]


def test_a_method_that_is_not_private_shows_its_claim_beside_the_proof():
    result = applications.principal_components(
        components(method="gaussian-inid-unclipped", epsilon=2.0)
    )
    assert (result["claimed_epsilon"], result["epsilon"]) == (2.0, math.inf)
    assert result["guarantee"].startswith("NOT PRIVATE")


def test_results_do_not_depend_on_who_holds_the_rows_but_for_rounding():
    spectra = [
        applications.principal_components(components(clients=c))["spectrum"] for c in (1, 13)
    ]
    assert spectra[0] == pytest.approx(spectra[1], abs=0.05)


# --- settings, folders, command line ---------------------------------------------------------------------------------


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["fedlgm", "apply", *map(str, arguments)])
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code or 0, capsys.readouterr()
    return 0, capsys.readouterr()


def test_the_command_line_writes_a_folder_and_json(monkeypatch, capsys, tmp_path):
    out = tmp_path / "run"
    code, text = command(
        monkeypatch, capsys, "coordinate-descent", "--set", "passes=2", "--out", out, "--json"
    )
    result = json.loads(text.out)
    assert code == 0
    assert "INFO" not in text.err  # Flower's own account of every round
    assert result["epsilon"] == pytest.approx(1.0, rel=1e-3)
    assert result["guarantee"].startswith("conditional (example-level, replace-one")
    assert {p.name for p in out.iterdir()} >= {
        "settings.toml",
        "ledger.sqlite",
        "metrics.jsonl",
        "result.json",
    }
    assert (out / "objective.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    again = command(monkeypatch, capsys, "coordinate-descent", out / "settings.toml", "--json")[1]
    assert json.loads(again.out)["theta"] == result["theta"]  # a run's settings repeat it
    code, text = command(monkeypatch, capsys, "pca", "--out", tmp_path / "pca")
    assert code == 0
    assert "epsilon conditional" in text.out
    assert (tmp_path / "pca" / "spectrum.png").is_file()
    basis = np.load(tmp_path / "pca" / "components.npy")
    assert basis.T @ basis == pytest.approx(np.eye(10), abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coordinate-descent", "--set", "data=iris"], "data: must be 'diabetes'"),
        (["coordinate-descent", "--set", "rule=best"], "rule: must be"),
        (
            ["coordinate-descent", "--set", "family=laplace", "--set", "delta=1e-5"],
            "delta must be 0 for Laplace",
        ),
        (["coordinate-descent", "--set", "delta=0"], "delta must be > 0 for Gaussian"),
        (["coordinate-descent", "--set", "epsilon=-1"], "epsilon: must be above 0"),
        (["coordinate-descent", "--set", "passes=0"], "passes: must be at least"),
        (["pca", "--set", "method=magic"], "method: unknown 'magic'; known: gaussian-iid"),
        (
            ["pca", "--set", "data=digits", "--set", "rank=65"],
            "rank: must be at most the 64 features",
        ),
        (["pca", "--set", "rank=101"], "rank"),
        (["pca", "missing.toml"], "missing.toml cannot be read"),
    ],
    ids=str,
)
def test_bad_input_ends_with_one_message_and_status_2(arguments, message, monkeypatch, capsys):
    code, text = command(monkeypatch, capsys, *arguments)
    assert code == 2
    assert message in text.err.replace("\n", " ")
    assert "Traceback" not in text.err


def test_bad_files_and_folders(tmp_path):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(RunError, match="already exists"):
        applications.principal_components(components(), tmp_path)
    file = tmp_path / "settings.toml"
    file.write_text("rank = 3\ncolour = 1\n")
    with pytest.raises(ConfigError, match="colour: unknown key; known: epsilon"):
        PcaSettings.load("pca", file)
    file.write_text("rank = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        PcaSettings.load("pca", file)


def test_more_clients_than_rows_and_recipes_stay_recipes():
    result = applications.coordinate_descent(descent(clients=600, passes=1))
    assert result["rows"] == 442
    assert not {"pca", "coordinate-descent"} & set(recipe.names())
    for name in ("inid-fashion-mnist", "inid-resnet20-cifar10"):
        assert (
            recipe.load(name, ["mechanism.name=laplace-spr"]).mechanism.build().family == "laplace"
        )
