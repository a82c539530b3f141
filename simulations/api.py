"""Simulations from Python: one call, one result that shows itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedlgm.errors import ConfigError, RunError
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly, settled
from simulations.config.messages import keys_like
from simulations.config.own import Own, own_of
from simulations.config.recipe import Overrides, Recipe
from simulations.launch import Engine
from simulations.runs.folder import RunFolder
from simulations.runs.rows import LayerRow, OnRound, RoundRow, RunSummary

if TYPE_CHECKING:
    from fedlgm.audits import AuditResult


_KEYS = {"partition": "data.partition", "server_optimizer": "federation.server_optimizer"}
"""Where a recipe names what is not a section of its own."""


class RunResult(Mapping[str, Any]):
    """A finished run: its summary as a mapping, its figures as attributes, its model, its history.

    Example:
        >>> import simulations, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder)
        >>> result.guarantee.startswith("proven"), len(result.history), len(list(result.model().parameters()))
        (True, 1, 4)

    Args:
        summary: the run's summary.
        assembly: the run's objects.
    """

    def __init__(self, summary: Mapping[str, Any], assembly: Assembly) -> None:
        self._summary, self._assembly = dict(summary), assembly

    def __getitem__(self, key: str) -> Any:
        return self._summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._summary)

    def __len__(self) -> int:
        return len(self._summary)

    @property
    def epsilon(self) -> float:
        """Proven epsilon at the recipe's delta; infinite for releases that are not private."""
        return float(self["epsilon"])

    @property
    def claimed_epsilon(self) -> float:
        """Epsilon as the method's authors would state it."""
        return float(self["claimed_epsilon"])

    @property
    def guarantee(self) -> str:
        """What is guaranteed, in one sentence."""
        return str(self["guarantee"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set; None for a task that has none."""
        value = self.get("accuracy")
        return None if value is None else float(value)

    @property
    def metrics(self) -> dict[str, float]:
        """All of the task's metrics on the test set."""
        return dict(self["metrics"])

    @cached_property
    def history(self) -> list[RoundRow]:
        """One public row per round, see `simulations.runs.rows.RoundRow`."""
        return list(self._folder.rows())

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self["run"])

    @property
    def _folder(self) -> RunFolder:
        return RunFolder.open(self.folder)

    def model(self) -> nn.Module:
        """The model with its final weights, in evaluation mode.

        Raises:
            RunError: the run's checkpoints are gone.
        """
        checkpoint = self._folder.latest(self._assembly.layers)
        if checkpoint is None:
            raise RunError(f"{self.folder} has no checkpoint any more")
        module = self._assembly.module()
        self._assembly.layers.load_(module, checkpoint.transcript.models[-1])
        return module.eval()

    def audit(self, **options: Any) -> AuditResult:
        """Audit the run: how much it leaks at least, by its canaries or by drawing its noise again from its seed.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp() + "/run"
            >>> changes = ["federation.rounds=3", "run.audit=true"]
            >>> result = simulations.simulate("digits", overrides=changes, run_dir=folder)
            >>> result.audit().passed
            True

        Args:
            options: method, confidence, canaries, see `fedlgm.audits.Audit`.

        Raises:
            ConfigError: an option outside its range.
            RunError: the run has neither canaries nor a seed: it says what to run again.
        """
        from fedlgm.audits import Audit
        from simulations.audits.targets import audit_run

        return audit_run(self.folder, Audit(**options), own=self._assembly.own)

    def layers(self) -> list[LayerRow]:
        """One row per layer of the last release: size, bound, noise, share, SNR."""
        from simulations.reports.planning import layer_rows

        checkpoint = self._folder.latest(self._assembly.layers)
        plan = checkpoint.transcript.plan if checkpoint is not None else None
        return [] if plan is None else layer_rows(plan)

    def __repr__(self) -> str:
        headline = self.get("headline", "accuracy")
        figure = self.metrics.get(headline, float("nan"))
        spent = f"epsilon {self.epsilon:.3f}, {self.guarantee.partition(':')[0]}"
        return f"RunResult({self['recipe']}: {headline} {figure:.4f}, {spent}; {self.folder})"

    def _repr_html_(self) -> str:
        """What a notebook shows: summary, guarantee, layers, curves."""
        from simulations.reports.notebook import summary_html

        correlated = self._assembly.facts.noise is not None
        return summary_html(self, self.history, self.layers(), correlated=correlated)


def simulate(
    recipe: str | Path | Recipe | None = None,
    *,
    model: Any = None,
    task: Any = None,
    data: Any = None,
    mechanism: Any = None,
    partition: Any = None,
    server_optimizer: Any = None,
    overrides: Overrides = (),
    engine: Engine = "local",
    run_dir: Path | str | None = None,
    progress: OnRound | None = None,
    **options: Any,
) -> RunResult:
    """Simulate a private federation.

    Example:
        >>> import numpy as np, tempfile, torch, simulations
        >>> x, y = np.random.default_rng(0).normal(size=(200, 5)), np.arange(200) % 2
        >>> result = simulations.simulate(
        ...     model=torch.nn.Linear(5, 2), data={"train": (x, y), "test": (x, y)},
        ...     overrides=["federation.clients=20", "federation.rounds=2", "privacy.delta=0.01"],
        ...     run_dir=tempfile.mkdtemp() + "/run",
        ... )
        >>> result.epsilon <= 8
        True

    Args:
        recipe: a bundled recipe's name, a file, or a `Recipe`; `digits` if left out. What is passed below stands in the
            place of its model, task, data and so on.
        model: an `nn.Module`, whose weights are the public initial ones, or a class or function that gives one. Like
            all that follow, it may also be a bundled name or "package.module:name".
        task: a `fedlgm.tasks.Task`, or a function (outputs [n, ...], targets [n, ...]) -> losses [n].
        data: a `fedlgm.data.DataSet`, or {"train": (x, y), "test": (x, y), "clients": [index arrays]} of NumPy arrays
            x [n, ...] and y [n, ...], with "clients" or "users" [n] where the data have clients of their own; else the
            recipe's partition divides the training set. The public seed of a bundled recipe is then left out.
        mechanism: a `fedlgm.Mechanism`.
        partition: a Partitioner of flwr-datasets, or a function (data, clients, seed) -> indices of each client.
        server_optimizer: an object with `step(model, mean_update)`, both of shape [parameters].
        overrides: changes of the recipe, {"section.key": value} or a list of "section.key=value"; None (or "none")
            removes a value, such as "run.seed" for data that need protection: the noise of a run with a seed can be
            drawn again.
        engine: "local" (this process), "ray" (resident actors) or "flower" (Flower's simulation runtime).
        run_dir: folder to create; by default `runs/<recipe>-<time>`.
        progress: called with each round's row.
        options: `workers`, `ray_address`, `supernodes`, `on_folder`, `trackers`, see `simulations.launch.simulate`.

    Returns:
        The run's figures, guarantee, history and model.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: with one clear message, before anything is written where
            possible.
    """
    given = {
        "task": task, "mechanism": mechanism, "model": model, "data": data, "partition": partition,
        "server_optimizer": server_optimizer,
    }  # fmt: skip
    texts = [f"{_KEYS.get(name, f'{name}.name')}={value}" for name, value in given.items() if isinstance(value, str)]
    objects = own_of({name: value for name, value in given.items() if not isinstance(value, str)})
    _known(options)
    parsed = _recipe(recipe, objects, texts, overrides)
    summary = launch.simulate(parsed, engine=engine, run_dir=run_dir, progress=progress, own=objects, **options)
    return _result(summary, objects)


def resume(
    run: Path | str,
    *,
    engine: Engine = "local",
    progress: OnRound | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    supernodes: int | None = None,
    **objects: Any,
) -> RunResult:
    """Continue an interrupted run to the model that an uninterrupted one would have reached, or open a finished one.

    Example:
        >>> import simulations, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> finished = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder)
        >>> simulations.resume(folder)["model_sha256"] == finished["model_sha256"]
        True

    Args:
        run: the run's folder.
        engine: see `simulate`.
        progress: called with each round's row.
        workers: see `simulations.launch.simulate`.
        ray_address: likewise.
        supernodes: likewise.
        objects: the objects that the run was started with (model, task, data, mechanism, partition, server_optimizer);
            others are refused.

    Raises:
        RunError: no run, other objects, or other clients than the run had.
    """
    own = own_of(objects)
    options = {"workers": workers, "ray_address": ray_address, "supernodes": supernodes}
    return _result(launch.resume(run, engine=engine, progress=progress, own=own, **options), own)  # type: ignore[arg-type]


_LAUNCHING = ("workers", "ray_address", "supernodes", "on_folder", "trackers")


def _known(options: Mapping[str, Any]) -> None:
    """Refuse an argument that `simulate` does not have, and say where a recipe has such a key."""
    for name, value in options.items():
        if name not in _LAUNCHING:
            keys = keys_like(name, Recipe)
            hint = f"; a recipe has the key {keys[0]}: overrides={{'{keys[0]}': {value!r}}}" if keys else ""
            raise ConfigError(f"simulate has no argument {name!r}{hint}")


def _recipe(recipe: str | Path | Recipe | None, own: Own, names: list[str], overrides: Overrides) -> Recipe:
    raw = recipe.model_dump(exclude_none=True) if isinstance(recipe, Recipe) else recipes.read(recipe)
    own.into(raw)
    if own.data is not None and (recipe is None or recipe in recipes.names()):
        # A bundled recipe's name and public seed belong to its public data: with the seed anybody can draw the noise.
        raw["name"] = "own-data"
        raw.get("run", {}).pop("seed", None)
    recipes.override(raw, names)
    recipes.override(raw, overrides)
    return recipes.validate(raw)


def _result(summary: RunSummary, own: Own) -> RunResult:
    recipe = RunFolder.open(Path(summary["run"])).recipe()
    return RunResult(summary, Assembly(settled(recipe), own))
