"""Functions that simulate a federation and resume a simulation from Python, and the result of a
run, which notebooks can display.
"""

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
"""The function `simulations.config.recipe.load`, which reads a recipe."""

_LAUNCHING = ("workers", "ray_address", "supernodes", "on_folder", "trackers")


class RunResult(Figures):
    """A finished run. It is a mapping of the summary's entries and also gives the run's figures,
    model and history.

    Example:
        >>> import simulations, tempfile
        >>> folder = tempfile.mkdtemp() + "/run"
        >>> result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder)
        >>> result.guarantee.startswith("proven"), len(result.history), len(list(result.model().parameters()))
        (True, 2, 4)

    Args:
        summary: the run's summary.
        own: the Python objects that the user passed to the run.
    """

    def __init__(self, summary: Mapping[str, Any], own: Own) -> None:
        # an absolute path, because the program may change its working directory
        super().__init__({**summary, "run": str(Path(summary["run"]).absolute())})
        self._own = own

    @property
    def epsilon(self) -> float:
        """Proven epsilon at the recipe's delta; infinite if the releases are not differentially
        private.
        """
        return float(self["epsilon"])

    @property
    def claimed_epsilon(self) -> float:
        """Epsilon that the authors of the method would claim for this run."""
        return float(self["claimed_epsilon"])

    @cached_property
    def attack_rates(self) -> AttackRates:
        """Bounds on the error rates of every attack that tries to detect one unit of the run, such
        as one client.

        Raises:
            LedgerError: the ledger is damaged.
        """
        with Ledger(self._folder.ledger_file) as ledger:
            return reported_rates(self._folder.recipe(), ledger)

    def statement(self) -> Statement:
        """Derive the privacy statement of the run from its recipe and ledger.

        Raises:
            LedgerError: the ledger is damaged, or does not match the recipe, the checkpoints or the
                result.
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
        """All metrics of the final model on the test set: those of the task, and those that the
        user passed to `simulate` as `metrics` or computed in `evaluate`.
        """
        return dict(self["metrics"])

    @cached_property
    @plain_defaults()
    def history(self) -> list[RoundRow]:
        """Row 0 with the "metrics" of the initial model, followed by one public row per round (see
        `simulations.runs.rows.RoundRow`). The initial model is evaluated when the history is read
        for the first time.

        Raises:
            DataError: the test data cannot be found any more.
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
        """Build the model with its final weights, in evaluation mode. A Hugging Face model has its
        original class.

        Raises:
            RunError: the run's checkpoints are gone.
        """
        return models.original(self.module())

    def coefficients(self) -> libraries.DataFrame:
        """Return the coefficients of a linear model, with one row for each input column and one row
        for the intercept.

        Each column of the frame stands for one output of the model. If this output is a class or an
        interval with a name, the column has this name. In the tasks "binary" and "ranked", the only
        output is the logit of the second class. If the data were standardised, the coefficients
        apply to the standardised inputs.

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
        """Build the final model in the form in which it was trained, whose outputs the task's loss
        takes. The errors are those of `model`.
        """
        return self._folder.checkpoints.into(
            self._assembly.model.module(), self._assembly.model.layers
        )

    @plain_defaults()
    def export(self, file: Path | str, *, adapter: bool = False) -> Exported:
        """Write the model, or only its adapters, to a file. The file's suffix determines the format
        (.onnx, .safetensors or .pt).

        The model and the data need not be passed again, even if they were given to `simulate` as
        Python objects.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp()
            >>> result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=folder + "/run")
            >>> result.export(folder + "/m.safetensors")["format"]
            'safetensors'

        Args:
            file: file to write.
            adapter: whether to write only the adapters (LoRA), in the format of `peft`; `file` is
                then a folder.

        Raises:
            ConfigError: the suffix names no format, the packages for .onnx are missing, or the
                model has no adapters.
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
            private: whether to write `private/report.html` instead, which also shows figures that
                no noise protects and must not be published.
        """
        return Path(tools.write_report(self.folder, private)["report"])

    @plain_defaults()
    def audit(self, **options: Any) -> Any:
        """Audit the run: compute a lower bound on its privacy loss, either from the run's canaries
        or from its noise, which is drawn again from the seed.

        Example:
            >>> import simulations, tempfile
            >>> folder = tempfile.mkdtemp() + "/run"
            >>> changes = ["federation.rounds=3", "run.audit=true"]
            >>> result = simulations.simulate("digits", overrides=changes, run_dir=folder)
            >>> result.audit().passed
            True

        Args:
            options: `method`, `confidence` and `canaries` (see `fedlgm_lab.audits.Audit`).

        Raises:
            ConfigError: an option is outside its range.
            RunError: the run has neither canaries nor a seed; the message says with which settings
                to run it again.
        """
        return tools.audit_run(self.folder, tools.Audit(**options), own=self._own)

    def layers(self) -> list[LayerRow]:
        """Return one row per layer of the last release, with the layer's size, bound, noise, share
        of the budget and signal-to-noise ratio.
        """
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
        """Return the notebook view as HTML, with the summary, the guarantee, the layers and the
        curves.
        """
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
            `transformers` or `peft`, or for a function that returns such a model; for any other
            model it is `digits`. The following arguments replace the recipe's model, task, data and
            so on.
        model: an `nn.Module` with the initial weights, which are public, or a class or function
            that returns a module; models of `transformers` and `peft` are modules. `model`, `task`,
            `data` and `mechanism` may also be bundled names or "package.module:name".
        task: a `fedlgm.training.tasks.Task`, or a function (outputs [n, ...], targets [n, ...]) ->
            losses [n]. For a Hugging Face model, the default is the task of the model's head.
        data: a `fedlgm.data.DataSet`, or {"train": (x, y), "test": (x, y), "clients": [index
            arrays]} of NumPy arrays x [n, ...] and y [n, ...], with "clients" or "users" [n] if it
            is given which client holds which example; otherwise the recipe's partition divides the
            training set. "train" and "test" may also be pandas frames or `datasets.Dataset` objects
            (see `fedlgm.data.tables`). With this argument, the public seed of a bundled recipe is
            dropped unless your recipe file or `overrides` set it, and if there are fewer than 20
            clients, all of them take part in every round of a bundled recipe.
        users: the column of these tables that names each example's user, or the user of each
            training example [n].
        mechanism: a `fedlgm.Mechanism`.
        partition: a Partitioner of flwr-datasets, or a function (data, clients, seed) -> indices of
            each client.
        server_optimizer: an object with `step(model, mean_update)`; both arguments have the shape
            [parameters].
        trainer: how clients train: a name (`fedlgm.training.kinds.names`) such as "fedprox", or a
            class or function (module, layers, settings, *, device, task) ->
            `fedlgm.training.Trainer`. The updates of every trainer are bounded.
        noise: correlation of the noise over the rounds: "banded", "square-root", "blt", or a
            `fedlgm.noise.correlation.Correlation` for as many rounds as the run has.
        metrics: further metrics in addition to those of the task: a mapping of names to functions
            (outputs [n, ...], targets [n, ...]) -> number. Each function gets the outputs and
            targets of the whole test set, as tensors on the CPU.
        evaluate: a function (round, module) -> {name: number} that gets the released model. It is
            called whenever the model is evaluated on the test set, and once before the run with the
            initial model (round 0). Its numbers are added to the metrics. If it reads only public
            data, it costs no privacy; if it reads private data, no budget covers what its numbers
            reveal.
        overrides: changes to the recipe, {"section.key": value} or a list of "section.key=value".
            None (or "none") removes a value. Remove "run.seed" for data that need protection,
            because the noise of a run with a seed can be drawn again.
        engine: "local" (this process), "processes" (forked from it), "ray" (resident actors),
            "flower" (Flower's simulation runtime), "auto" (the best one for the machine), another
            name or reference (`simulations.engines`), or an `Engine`.
        run_dir: folder to create; by default `runs/<recipe>-<time>`.
        progress: a function that is called with each round's row. By default a line in the terminal
            or in the notebook shows the progress; elsewhere, a line is written to standard error
            every 30 seconds. With False, nothing is shown.
        options: `workers`, `ray_address`, `supernodes`, `on_folder`, `trackers` (see
            `simulations.launch.simulate`).

    Returns:
        The finished run, with its figures, guarantee, history and model.

    Raises:
        ConfigError, DataError, PrivacyError, RunError: an argument or setting cannot be used. The
            message says why, and if possible the error is raised before anything is written.
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
    except KeyboardInterrupt as stop:  # its note on how to continue is then easy to find
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
    """Continue an interrupted run, or open a finished run. The final model of a continued run is
    the one that the run would have had without the interruption.

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
        users: the same as for `simulate`, if the run was started with this argument.
        objects: the objects that were passed to `simulate` (`model`, `task`, `data`, `mechanism`
            and so on). Different objects are refused, except for `metrics` and `evaluate`.

    Raises:
        RunError: there is no such run, or the objects or the clients differ from those with which
            the run was started.
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
