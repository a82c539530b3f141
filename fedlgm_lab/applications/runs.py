"""Coordinate descent and PCA as real federations, with the same strategy, client and ledger that
train a model.

A run's folder holds settings.toml, metrics.jsonl, ledger.sqlite, result.json and a picture. Figures
that compare with the non-private optimum use the data without protection. They are diagnostics for
a simulation: the result lists them under "diagnostics", and metrics.jsonl and the picture also show
them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients import AnyClient, ClientData, LayerwiseClient, LocalWork
from fedlgm.errors import ConfigError, RunError
from fedlgm.files import is_used
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Relation
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import LocalTraining, Trainer
from fedlgm_lab.applications import coordinate_descent as cd
from fedlgm_lab.applications import pca
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
    unpack,
)
from fedlgm_lab.applications.objectives import Array, Lasso, Logistic, Objective
from fedlgm_lab.applications.settings import DescentSettings, PcaSettings, Settings
from fedlgm_lab.applications.smoothness import smoothness
from simulations.engines.local import LocalGrid
from simulations.runs.folder import RunFolder
from strategies import AnyNode, CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer
from strategies.server_optimizer import ServerStep

_PUBLIC_FACTS = (
    "every release is a sum of clipped derivatives plus noise; it holds if the number of rows, "
    "the scaling of features and targets and the smoothness constants are public, and here they "
    "come from the data"
)
_PUBLIC_ROWS = (
    "it holds if the number of rows is public: the number is printed, and delta may follow from it"
)


@dataclass(frozen=True)
class RowSource:
    """Clients that hold the rows of one table.

    Attributes:
        x: all rows, float64 [N, K].
        y: targets of the rows, float64 [N].
        members: row numbers of each client.
    """

    x: Tensor
    y: Tensor
    members: tuple[np.ndarray, ...]

    @classmethod
    def deal(cls, x: Array, y: Array, clients: int, keys: KeyRing) -> RowSource:
        """Divide the rows among `clients` clients at random, as evenly as possible; some clients
        may get none.
        """
        order = keys.numpy_generator(Purpose.PARTITION).permutation(len(y))
        return cls(torch.from_numpy(x), torch.from_numpy(y), tuple(np.array_split(order, clients)))

    def __call__(self, client: int) -> ClientData:
        """Return the rows of client number `client`."""
        rows = self.members[client]
        return ClientData(self.x[rows], self.y[rows])


def federate(
    mechanism: Mechanism,
    trainer: Trainer,
    layers: LayerTable,
    source: RowSource,
    optimizer: ServerStep,
    *,
    rounds: int,
    relation: Relation,
    keys: KeyRing,
    ledger: Ledger,
    on_model: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, ReleasePlan]:
    """Make the releases of `rounds` rounds over an in-process grid, starting from a zero model.

    Every client takes part in every round.

    Args:
        mechanism: mechanism that plans the releases.
        trainer: trainer that computes the clients' updates.
        layers: the released vector's layers.
        source: the clients' rows.
        optimizer: the server's step.
        rounds: number of rounds.
        relation: neighbouring relation, whose unit is one row.
        keys: source of the noise.
        ledger: ledger that is charged before each release.
        on_model: called with each finished round's number and model.

    Returns:
        The last model and the last plan.
    """
    clients = len(source.members)
    facts = RunFacts(1.0, Sampling("poisson", clients, 1.0), relation, rounds=rounds)
    work = LocalWork(trainer, LocalTraining(), source)
    client = LayerwiseClient(work, mechanism, layers, keys, AnyClient())
    strategy = LayerwiseFedAvg(
        Method(mechanism, layers, facts),
        Transcript.start(torch.zeros(layers.size)),
        CohortSampler(facts.sampling, keys),
        optimizer,
        Releaser(keys, ledger),
        AnyNode(),
        on_round=None
        if on_model is None
        else lambda record, past: on_model(record.round, past.models[-1]),
    )
    logging.getLogger("flwr").setLevel(logging.ERROR)  # the summary says what was done
    strategy.start(LocalGrid.of(client), strategy.initial_arrays(), num_rounds=rounds)
    transcript = strategy.transcript
    assert transcript.plan is not None
    return transcript.models[-1], transcript.plan


def coordinate_descent(settings: DescentSettings, out: Path | None = None) -> dict[str, Any]:
    """Run private coordinate descent over a federation of clients that hold rows.

    Args:
        settings: settings of the descent.
        out: folder to create for the run; if it is None, no files remain.

    Returns:
        The summary: spent budget, guarantee, errors, and the objective after each pass.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: a setting cannot be used; the message says
            why.
    """
    data = load_tabular(settings.data, scaling=settings.scaling)
    x, y, rows = data.features, data.targets, len(data.targets)
    objective: Objective = (Logistic if data.classification else Lasso)(settings.strength)
    delta, keys = settings.delta_of(rows), KeyRing.from_seed(settings.seed)
    constants = smoothness(objective, x)
    plan = cd.plan_descent(
        constants,
        budget=cd.pass_budget(settings.family, settings.epsilon, delta, settings.passes),
        rule=settings.rule,
        clip=settings.clip,
        rate=settings.rate,
        passes=settings.passes,
        rows=rows,
        family=settings.family,
        relation=settings.relation,
    )
    plan = replace(
        plan, guarantee=replace(plan.guarantee, status="conditional", reason=_PUBLIC_FACTS)
    )
    source, layers = RowSource.deal(x, y, settings.clients, keys), coordinate_table(len(constants))
    best = _optimum(objective, x, y, constants)
    values = [objective.value(np.zeros(len(constants)), x, y)]
    with _run_folder(out, settings) as (folder, ledger):

        def on_model(round_: int, theta: Tensor) -> None:
            if round_ % len(constants) == 0:
                values.append(objective.value(theta.double().numpy(), x, y))
                folder.append(
                    {"round": round_, "pass": round_ // len(constants), "objective": values[-1]}
                )

        theta, released = federate(
            CoordinateRelease("coordinate-descent", descent=plan),
            CoordinateSums(objective, plan),
            layers,
            source,
            ProximalStep(objective, plan, settings.clients),
            rounds=settings.passes * len(constants),
            relation=settings.relation,
            keys=keys,
            ledger=ledger,
            on_model=on_model,
        )
        result = _result(settings, ledger, delta, released) | {
            "application": "coordinate-descent",
            "rows": rows,
            "coordinates": len(constants),
            "theta": theta.tolist(),
            "diagnostics": {
                "objective": values[-1],
                "optimum": best,
                "relative_error": values[-1] / best - 1,
                "objective_by_pass": values,
            },
        }
        if out is not None:
            from fedlgm_lab.reports.figures import draw_descent

            draw_descent(
                values,
                best,
                f"{settings.data}, {settings.rule}, {settings.family}",
                out / "objective.png",
            )
            result["run"] = str(out)
        folder.finish(result)
    return result


def principal_components(settings: PcaSettings, out: Path | None = None) -> dict[str, Any]:
    """Run private PCA over a federation of clients that hold rows, in one release; the arguments
    are those of `coordinate_descent`.

    Raises:
        ConfigError: the rank is larger than the number of features, or as in `coordinate_descent`.
    """
    keys = KeyRing.from_seed(settings.seed)
    x, truth = _pca_rows(settings, keys)
    rows, dimension = x.shape
    if settings.rank > dimension:
        raise ConfigError(
            f"rank: must be at most the {dimension} features of {settings.data}, got "
            f"{settings.rank}"
        )
    delta = settings.delta_of(rows)
    plan = pca.covariance_plan(settings.method, dimension, settings.epsilon, delta)
    plan = replace(plan, guarantee=plan.guarantee.conditional_on(_PUBLIC_ROWS))
    exact = x.T @ x
    if truth is None:
        truth = pca.top_subspace(exact, settings.rank)
    layers = covariance_table(plan)
    claimed = None if plan.protected else settings.epsilon
    with _run_folder(out, settings) as (folder, ledger):
        vector, released = federate(
            CovarianceRelease("pca", covariance=plan, claimed_epsilon=claimed),
            CovarianceSums(plan),
            layers,
            RowSource.deal(x, np.zeros(rows), settings.clients, keys),
            # the rate undoes the division by the number of clients, so the "model" is the released
            # sum
            ServerOptimizer("sgd", float(settings.clients)),
            rounds=1,
            relation=plan.guarantee.relation,
            keys=keys,
            ledger=ledger,
        )
        noisy = unpack(vector, plan)
        basis = pca.top_subspace(noisy, settings.rank)
        error = float(pca.subspace_recovery_error(basis, truth))
        result = _result(settings, ledger, delta, released) | {
            "application": "pca",
            "rows": rows,
            "dimension": dimension,
            "spectrum": np.linalg.eigvalsh(noisy)[::-1].tolist(),
            "diagnostics": {
                "recovery_error": error,
                "variance_kept": float(np.trace(basis.T @ exact @ basis))
                / _explained_variance(exact, settings.rank),
                "spectrum": np.linalg.eigvalsh(exact)[::-1].tolist(),
            },
        }
        folder.append({"round": 1, "recovery_error": error})
        if out is not None:
            from fedlgm_lab.reports.figures import draw_spectrum

            title = f"{settings.data}, {settings.method}: recovery error {error:.3f}"
            draw_spectrum(
                result["diagnostics"]["spectrum"], result["spectrum"], title, out / "spectrum.png"
            )
            np.save(out / "components.npy", basis)
            result["run"] = str(out)
        folder.finish(result)
    return result


def _result(settings: Settings, ledger: Ledger, delta: float, plan: ReleasePlan) -> dict[str, Any]:
    """Collect the settings of an application, the spent budget and the guarantee."""
    return {
        **settings.model_dump(exclude={"delta", "epsilon"}),
        "budget": settings.epsilon,
        "delta": delta,
        "epsilon": ledger.epsilon(delta),
        "claimed_epsilon": ledger.claimed_epsilon(delta),
        "guarantee": plan.guarantee.sentence(noise_reproducible=True),
        "noise_reproducible": True,
        "guarantee_status": plan.guarantee.status,
    }


def _optimum(objective: Objective, x: Array, y: Array, constants: Array) -> float:
    """Compute the non-private optimum by descent without clipping and without noise."""
    plan = cd.plan_descent(
        constants, budget=1.0, rule="spr", clip=1.0, rate=1.0, passes=500, rows=len(y)
    )
    exact = replace(plan, clip=np.full(constants.size, np.inf), noise=np.zeros(constants.size))
    return objective.value(
        cd.descend(objective, x, y, exact, KeyRing(0).numpy_generator(Purpose.PROBE))[-1], x, y
    )


def _explained_variance(exact: Array, rank: int) -> float:
    return float(np.linalg.eigvalsh(exact)[-rank:].sum())


def _pca_rows(settings: PcaSettings, keys: KeyRing) -> tuple[Array, Array | None]:
    if settings.data == "synthetic":
        return fully_random_rows(
            settings.dimension, settings.rank, settings.rows, keys.numpy_generator(Purpose.PROBE)
        )
    from sklearn.datasets import load_digits

    x = load_digits().data
    return x / np.linalg.norm(x, axis=1, keepdims=True), None


@contextmanager
def _run_folder(out: Path | None, settings: Settings) -> Iterator[tuple[RunFolder, Ledger]]:
    """Create a folder with the settings and an open ledger; a temporary folder if `out` is None."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) if out is None else out
        folder, text = RunFolder(path), settings.to_toml()
        if out is not None and is_used(out):
            raise RunError(f"{out} already exists: choose another --out")
        with folder.writing():
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
            (path / "settings.toml").write_text(text, encoding="utf-8")
            with Ledger(path / "ledger.sqlite", owner=text) as ledger:
                yield folder, ledger
