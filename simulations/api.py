"""Simulations from Python, with one call and one result that has a notebook view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import nn

from fedlgm import data as data_sets
from fedlgm import libraries
from fedlgm.data.tables import INTERCEPT
from fedlgm.errors import RunError
from fedlgm.privacy.attackers import AttackRates
from fedlgm.privacy.guarantee import caveat_of
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import inputs, models
from fedlgm.training.devices import plain_defaults
from fedlgm.training.tasks.own_figures import Evaluate
from fedlgm.training.tasks.set_metrics import Metric
from simulations import launch, tools
from simulations.arguments import refuse_unknown, resolve
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.overrides import Overrides
from simulations.config.own import Own, own_of
from simulations.config.recipe import Recipe
from simulations.engines import Engine
from simulations.figures import Figures
from simulations.live import progress_line
from simulations.runs.folder import RunFolder
from simulations.runs.recorder import measure
from simulations.runs.rows import LayerRow, OnRound, RoundRow, Statement
from simulations.runs.stopping import reported_rates
from simulations.summaries.report_types import Exported

load_recipe = recipes.load
"""Read a recipe: `simulations.config.recipe.load`."""

_LAUNCHING = ("workers", "ray_address", "supernodes", "on_folder", "trackers")


class RunResult(Figures):
    """A finished run, with its summary as a mapping, figures as attributes, model and history.

    Example:
        >>> import simulations, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder)
        >>> result.guarantee.startswith("proven"), len(result.history), len(list(result.model().parameters()))
        (True, 2, 4)

    Args:
        summary: the run's summary.
        own: the objects that the run was given.
    """

    def __init__(self, summary: Mapping[str, Any], own: Own) -> None:
        # the program may change folders
        super().__init__({**summary, "run": str(Path(summary["run"]).absolute())})
        self._own = own

    @property
    def epsilon(self) -> float:
        """Proven epsilon at the recipe's delta. It is infinite for releases that are not
        private.
        """
        return float(self["epsilon"])

    @property
    def claimed_epsilon(self) -> float:
        """Epsilon that the method's authors would state."""
        return float(self["claimed_epsilon"])

    @cached_property
    def attack_rates(self) -> AttackRates:
        """Bounds on every attack on one unit of the run.

        Raises:
            LedgerError: the ledger is damaged.
        """
        with Ledger(self._folder.ledger_file) as ledger:
            return reported_rates(self._folder.recipe(), ledger)

    def statement(self) -> Statement:
        """The privacy statement of the run, derived from its recipe and ledger.

        Raises:
            LedgerError: the ledger is damaged, or does not match recipe, checkpoints and result.
        """
        return self._folder.verified_result()["statement"]

    @property
    def guarantee(self) -> str:
        """The guarantee in one sentence."""
        return str(self["guarantee"])

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set; None for a task without accuracy."""
        value = self.get("accuracy")
        return None if value is None else float(value)

    @property
    def metrics(self) -> dict[str, float]:
        """All metrics of the final model on the test set: the metrics of the task, and the metrics
        given to `simulate(metrics=...)`.
        """
        return dict(self["metrics"])

    @cached_property
    @plain_defaults()
    def history(self) -> list[RoundRow]:
        """One public row per round (see `simulations.runs.rows.RoundRow`), after row 0. Row 0 holds
        the "metrics" of the initial model, which is evaluated when the history is first read.

        Raises:
            DataError: the test data are no longer there.
        """
        before = measure(self._assembly, self._assembly.model.module(), 0)
        initial: Any = {"round": 0, "metrics": before, "headline": self["headline"]}
        initial |= {name: before[name] for name in ("loss", "accuracy") if name in before}
        return [initial, *self._folder.rows()]

    @property
    def labels(self) -> list[str] | None:
        """Names of the classes, or of the intervals of `hazards`, in the order of the model's
        outputs; None if there are no names.
        """
        return self._folder.labels()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self["run"])

    @cached_property
    def _folder(self) -> RunFolder:
        return RunFolder.open(self.folder)

    @cached_property
    def _assembly(self) -> Assembly:
        return Assembly(self._folder.recipe(), self._own)

    def model(self) -> nn.Module:
        """The model with its final weights, in evaluation mode; a Hugging Face model keeps its own
        class.

        Raises:
            RunError: the run's checkpoints are gone.
        """
        return models.original(self.module())

    def coefficients(self) -> libraries.DataFrame:
        """Coefficients of a linear model: one row for each column of the table and one for the
        intercept.

        Each column of the frame belongs to one output of the model. If this output is a class or
        interval with a name, the column has this name. The one output of the tasks "binary" and
        "ranked" is the logit of the second class. The coefficients belong to the model's inputs: to
        the standardised columns if the data were standardised.

        Example:
            >>> import pandas, simulations, tempfile, torch
            >>> table = pandas.DataFrame({"age": [52.0, 61.0] * 20, "dose": [1.0, 2.0] * 20, "ill": ["no", "yes"] * 20})
            >>> result = simulations.simulate(
            ...     model=torch.nn.Linear(2, 2), data={"train": table, "test": table, "target": "ill"},
            ...     overrides=["federation.clients=20", "federation.rounds=1", "privacy.delta=0.01"],
            ...     run_dir=tempfile.mkdtemp() + "/run",
            ... )
            >>> list(result.coefficients().index), list(result.coefficients().columns)
            (['age', 'dose', '(intercept)'], ['no', 'yes'])

        Raises:
            RunError: the model is not one linear layer, or the data had no named columns.
        """
        import pandas

        from simulations.exports.export import linear_of
        from simulations.exports.predict import names_of_outputs

        layer, columns = linear_of(self.model()), self._folder.provenance.read().get("columns")
        if layer is None:
            raise RunError(
                "only a model of one linear layer has coefficients: this model has other layers"
            )
        if columns is None or len(columns) != layer.in_features:
            raise RunError(
                "coefficients need names: the data were arrays, not tables with named columns"
            )
        names, rows = [column["name"] for column in columns], layer.weight.T.tolist()
        if layer.bias is not None:
            names, rows = [*names, INTERCEPT], [*rows, layer.bias.tolist()]
        count, task = layer.out_features, self._assembly.data.task.name
        outputs = names_of_outputs(count, task, self.labels or ())
        outputs = outputs or [f"output {i}" for i in range(count)]
        return pandas.DataFrame(rows, index=names, columns=outputs)

    @plain_defaults()
    def module(self) -> nn.Module:
        """The model in the form in which it was trained. The task's loss takes its outputs. It
        raises the errors of `model`.
        """
        return self._folder.checkpoints.into(
            self._assembly.model.module(), self._assembly.model.layers
        )

    @plain_defaults()
    def export(self, file: Path | str, *, adapter: bool = False) -> Exported:
        """Write the model to a file whose suffix names the format (.onnx, .safetensors, .pt), or
        only its adapters.

        No further arguments are needed, even if model and data were passed as Python objects.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder + "/run")
            >>> result.export(folder + "/m.safetensors")["format"]
            'safetensors'

        Args:
            file: file to write.
            adapter: write the adapters (LoRA) in the format of `peft` instead; `file` is then a
                folder.

        Raises:
            ConfigError: the suffix names no format, the packages for .onnx are missing, or there
                are no adapters.
            RunError: PyTorch cannot express the model as ONNX, or the file cannot be written.
        """
        from simulations.exports.adapter_files import export_adapter
        from simulations.exports.export import export, format_of

        module = self._assembly.model.module()
        if adapter:
            return export_adapter(self.folder, file, module)
        example = inputs.take(self._assembly.data.dataset.test_x, slice(2))
        return export(self.folder, format_of(file), file, module, example)

    def report(self, *, private: bool = False) -> Path:
        """Write the run's report, `report.html` in its folder, and return the file.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp() + "/run"
            >>> simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder).report().name
            'report.html'

        Args:
            private: write `private/report.html` instead, which also shows figures that no noise
                protects.
        """
        return Path(tools.write_report(self.folder, private)["report"])

    @plain_defaults()
    def audit(self, **options: Any) -> Any:
        """Audit the run. The result is a lower bound on its leakage. It comes from the run's
        canaries, or from its noise, which is drawn again from the seed.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp() + "/run"
            >>> changes = ["federation.rounds=3", "run.audit=true"]
            >>> result = simulations.simulate("digits", overrides=changes, run_dir=folder)
            >>> result.audit().passed
            True

        Args:
            options: method, confidence, canaries (see `fedlgm_lab.audits.Audit`).

        Raises:
            ConfigError: an option is outside its range.
            RunError: the run has neither canaries nor a seed; the message says what to run again.
        """
        return tools.audit_run(self.folder, tools.Audit(**options), own=self._own)

    def layers(self) -> list[LayerRow]:
        """One row per layer of the last release: size, bound, noise, share, SNR."""
        from simulations.summaries.planning import layer_rows

        checkpoint = self._folder.checkpoints.latest(self._assembly.model.layers)
        plan = checkpoint.transcript.plan if checkpoint is not None else None
        return [] if plan is None else layer_rows(plan)

    def __repr__(self) -> str:
        headline = self["headline"]
        figure = self.metrics.get(headline, float("nan"))
        kind = f"{self.guarantee.partition(':')[0]}{caveat_of(self['noise_reproducible'])}"
        spent = f"epsilon {self.epsilon:.3f}, {kind}"
        return f"RunResult({self['recipe']}: {headline} {figure:.4f}, {spent}; {self.folder})"

    def _repr_html_(self) -> str:
        """Notebook view: summary, guarantee, layers, curves."""
        correlated = self._assembly.privacy.facts.noise is not None
        return tools.summary_html(
            self, list(self._folder.rows()), self.layers(), correlated=correlated
        )


@plain_defaults()
def simulate(
    recipe: str | Path | Recipe | None = None,
    *,
    model: Any = None,
    task: Any = None,
    data: Any = None,
    users: Any = None,
    mechanism: Any = None,
    partition: Any = None,
    server_optimizer: Any = None,
    trainer: Any = None,
    noise: Any = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate: Evaluate | None = None,
    overrides: Overrides = (),
    engine: str | Engine = "local",
    run_dir: Path | str | None = None,
    progress: OnRound | Literal[False] | None = None,
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
        recipe: a bundled recipe's name, a file, or a `Recipe`. The default is `lora` for a model of
            `transformers` or `peft`, or for a function that returns such a model. Otherwise the
            default is `digits`. The following arguments replace its model, task, data and so on.
        model: an `nn.Module`, with the initial weights, which are public, or a class or function
            that returns a module; models of `transformers` and `peft` are modules. Like
            task, data and mechanism, it may also be a bundled name or "package.module:name".
        task: a `fedlgm.training.tasks.Task`, or a function (outputs [n, ...], targets [n, ...]) ->
            losses [n]. Default for a Hugging Face model: the task of its head.
        data: a `fedlgm.data.DataSet`, or {"train": (x, y), "test": (x, y), "clients": [index
            arrays]} of NumPy arrays x [n, ...] and y [n, ...], with "clients" or "users" [n] if the
            data have their own clients; otherwise the recipe's partition divides the training set.
            Both parts may also be pandas frames or `datasets.Dataset` objects (see
            `fedlgm.data.tables`). With this argument the public seed of a bundled recipe is
            dropped, unless your recipe file or overrides state it. If there are fewer than 20
            clients, all of them take part in every round of a bundled recipe.
        users: the column of such tables that names each example's user, or the users of the
            training examples [n].
        mechanism: a `fedlgm.Mechanism`.
        partition: a Partitioner of flwr-datasets, or a function (data, clients, seed) -> indices of
            each client.
        server_optimizer: an object with `step(model, mean_update)`; both arguments have the shape
            [parameters].
        trainer: training of the clients: a name (`fedlgm.training.kinds.names`) such as "fedprox",
            or a class or function (module, layers, settings, *, device, task) ->
            `fedlgm.training.Trainer`. Its result is bounded like any update.
        noise: correlation of the noise over the rounds: "banded", "square-root", "blt", or a
            `fedlgm.noise.correlation.Correlation` for as many rounds as the run has.
        metrics: functions by name, (outputs [n, ...], targets [n, ...]) -> number for the whole
            test set. They are added to the task's own metrics. Both arguments are tensors on the
            CPU.
        evaluate: a function (round, module) -> {name: number} of the released model, called
            wherever the test set is evaluated, and once before the run on the initial model (round
            0). Its figures join the metrics. They cost no privacy on public data; on private data
            no budget covers them.
        overrides: changes to the recipe, {"section.key": value} or a list of "section.key=value".
            None (or "none") removes a value, such as "run.seed" for data that need protection,
            since the noise of a run with a seed can be drawn again.
        engine: "local" (this process), "processes" (forked from it), "ray" (resident actors),
            "flower" (Flower's simulation runtime), "auto" (the best one for the machine), another
            name or reference (`simulations.engines`), or an `Engine`.
        run_dir: folder to create; by default `runs/<recipe>-<time>`.
        progress: called with each round's row. By default a line on standard error shows the
            progress, and a log gets a line every 30 seconds. False shows nothing.
        options: `workers`, `ray_address`, `supernodes`, `on_folder`, `trackers` (see
            `simulations.launch.simulate`).

    Returns:
        The run's figures, guarantee, history and model.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: an argument or setting cannot be used; one
            message says why, if possible before anything is written.
    """
    given = {
        "task": models.task_of(model) if task is None else task, "mechanism": mechanism,
        "model": model, "partition": partition, "data": data_sets.with_users(data, users),
        "server_optimizer": server_optimizer, "trainer": trainer, "metrics": metrics,
        "evaluate": evaluate, "noise": noise,
    }  # fmt: skip
    refuse_unknown("simulate", options, _LAUNCHING)
    parsed, own = resolve(recipe, given, overrides)
    try:
        with progress_line(parsed, progress) as on_round:
            summary = launch.simulate(
                parsed, engine=engine, run_dir=run_dir, progress=on_round, own=own, **options
            )
    except KeyboardInterrupt as stop:  # its note says how to continue, after a short traceback
        raise stop.with_traceback(None) from None
    return RunResult(summary, own)


@plain_defaults()
def resume(
    run: Path | str,
    *,
    engine: str | Engine = "local",
    progress: OnRound | Literal[False] | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    supernodes: int | None = None,
    users: Any = None,
    **objects: Any,
) -> RunResult:
    """Continue an interrupted run, or open a finished run. The final model is the same as the model
    of an uninterrupted run.

    Example:
        >>> import simulations, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> finished = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder)
        >>> simulations.resume(folder)["model_sha256"] == finished["model_sha256"]
        True

    Args:
        run: the run's folder.
        engine: see `simulate`.
        progress: see `simulate`.
        workers: see `simulations.launch.simulate`.
        ray_address: see `simulations.launch.simulate`.
        supernodes: see `simulations.launch.simulate`.
        users: as for `simulate`, if the run was started with it.
        objects: the objects that the run was started with (model, task, data, mechanism, partition,
            server_optimizer); others are refused. `metrics` and `evaluate` may differ.

    Raises:
        RunError: there is no such run, or the given objects or clients are not the run's.
    """
    refuse_unknown("resume", objects, [field.name for field in fields(Own)])
    objects["data"] = data_sets.with_users(objects.get("data"), users)
    own, folder = own_of(objects), RunFolder.open(run)
    places: dict[str, Any] = {
        "workers": workers, "ray_address": ray_address, "supernodes": supernodes,
    }  # fmt: skip
    try:
        with progress_line(folder.recipe(), progress) as on_round:
            summary = launch.resume(folder, engine=engine, progress=on_round, own=own, **places)
    except KeyboardInterrupt as stop:
        raise stop.with_traceback(None) from None
    return RunResult(summary, own)
