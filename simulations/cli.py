"""The `fedlgm` command. Heavy imports happen inside the commands, so that `--help` answers at
once.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from click import Argument, Context, NoSuchOption, UsageError

from simulations import tools
from simulations.ending import ending, offer_to_continue, report_as_json
from simulations.projects.new_command import new
from simulations.shell import (
    Commands,
    JsonOption,
    NamedRecipeArgument,
    RecipeArgument,
    RunArgument,
    SetOption,
    console,
    print_json,
    show,
)


class _Commands(Commands):
    """Commands that take only text, and name the recipe's key for an unknown option."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Refuse arguments that neither a file's name nor a recipe can hold, before any command
        sees them.
        """
        for arg in args:
            if "\0" in arg or any("\ud800" <= character <= "\udfff" for character in arg):
                raise UsageError(f"{arg!r} is not text: it has a zero byte, or is not UTF-8.", ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Context) -> Any:
        """Run the command that the arguments name."""
        try:
            return self._invoke(ctx)
        except UsageError as error:
            report_as_json(error, error.format_message())
            raise

    def _invoke(self, ctx: Context) -> Any:
        try:
            return super().invoke(ctx)
        except NoSuchOption as error:
            options = [
                option
                for parameter in (error.ctx.command.params if error.ctx else ())
                for option in parameter.opts
            ]
            if error.option_name in ("--mechanism", "--mechanisms") and "--methods" in options:
                raise UsageError(
                    f"No such option {error.option_name!r}: use --methods.", error.ctx
                ) from error
            if "--set" in options:
                from simulations.config.recipe import Recipe
                from simulations.config.validation_messages import keys_like

                name = error.option_name.strip("-").replace("-", "_")
                hint = " or ".join(f"--set {key}=VALUE" for key in keys_like(name, Recipe))
                if hint:
                    said = f"No such option {error.option_name!r}: it is a key of the recipe; use {hint}."
                    raise UsageError(said, error.ctx) from error
            raise
        except UsageError as error:
            if error.ctx is None or "unexpected extra argument" not in error.message:
                raise
            command = error.ctx.command
            takes = [
                parameter.human_readable_name
                for parameter in command.params
                if isinstance(parameter, Argument)
            ]
            option_names = [
                option.opts[0]
                for option in command.params
                if getattr(option, "is_flag", True) is False
            ]
            said = f"{error.message}: the command takes {'only ' + ' and '.join(takes) if takes else 'no argument'}"
            rest = f"; values of options follow {', '.join(option_names)}" if option_names else ""
            raise UsageError(f"{said}{rest}.", error.ctx) from error


# Panels of `fedlgm --help`, each with its commands in the order in which they are registered here.
_TRAIN, _PLAN, _READ = "Train and compare", "Plan, without training on private data", "Read a run"
_MACHINE = "Check the installation"

app = typer.Typer(
    cls=_Commands,
    help="Layer-wise differentially private federated learning: every mechanism under one "
    "accountant.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from fedlgm import __version__

        typer.echo(f"fedlgm {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool,
    typer.Option(
        "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
]


@app.callback()
def _options(version: VersionOption = False) -> None:
    pass


@app.command(rich_help_panel=_TRAIN)
def simulate(
    recipe: RecipeArgument = None,
    engine: Annotated[
        str,
        typer.Option(
            help="Engine: auto, processes, local, ray or flower; auto picks what suits the machine."
        ),
    ] = "auto",
    rounds: Annotated[int | None, typer.Option(help="Overrides federation.rounds.")] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides run.seed.")] = None,
    overrides: SetOption = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Training processes; by default one per core.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster to join.")
    ] = None,
    supernodes: Annotated[
        int | None,
        typer.Option(min=1, help="For the flower engine: number of simulated SuperNodes."),
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder to create for the run.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run instead of starting one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a private federation."""
    from fedlgm.errors import ConfigError
    from simulations import launch
    from simulations.config import recipe as recipes
    from simulations.runs.folder import RunFolder
    from simulations.summaries import terminal as display

    changes = list(overrides or [])
    changes += [f"federation.rounds={rounds}"] if rounds is not None else []
    changes += [f"run.seed={seed}"] if seed is not None else []
    folder = None if resume is None else RunFolder.open(resume)
    if folder is None:
        parsed = recipes.load(recipe, changes)
    elif recipe is not None or changes or run_dir is not None:
        raise ConfigError(
            "--resume continues a run as it was started: leave out the recipe and every override"
        )
    else:
        parsed = folder.recipe()
    options: dict[str, Any] = {
        "engine": engine, "workers": workers, "ray_address": ray_address, "supernodes": supernodes,
    }  # fmt: skip
    with (
        offer_to_continue(resume, engine) as set_folder,
        # What Ray prints when it loses a worker is not this command's output.
        contextlib.redirect_stdout(sys.stderr),
        display.progress(parsed, shown=not as_json) as on_round,
    ):
        if folder is None:
            result = launch.simulate(
                parsed, run_dir=run_dir, progress=on_round, on_folder=set_folder, **options
            )
        else:
            result = launch.resume(folder, progress=on_round, **options)
    show(result, display.summary, as_json)


app.command(rich_help_panel=_TRAIN)(new)


@app.command(rich_help_panel=_TRAIN)
def pretrain(
    recipe: NamedRecipeArgument = "text-adapters",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Public UTF-8 text; repeatable. Default: docstrings of Python packages."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of Adam steps.")] = 1500,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: the recipe's model.weights.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train the public base of a text recipe, without privacy, on public text."""
    from simulations.config import recipe as recipes
    from simulations.pretrain import pretrain as pretraining

    def show(step: int, loss: float) -> None:
        if not as_json:
            console.print(f"step {step}: {loss:.3f} nats per character", highlight=False)

    done = pretraining(
        recipes.load(recipe, overrides or ()), out, texts=text or (), steps=steps, progress=show
    )
    if as_json:
        print_json(dict(done))
        return
    console.print(
        f"wrote {done['file']} (SHA-256 {done['sha256']})", highlight=False, soft_wrap=True
    )


@app.command(rich_help_panel=_PLAN)
def plan(
    recipe: RecipeArgument = None,
    overrides: SetOption = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Show noise and SNR at epsilon 1 to 8 and 100 to 10,000 clients instead of one "
            "plan.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a recipe would release, layer by layer, without training."""
    from simulations.config import recipe as recipes
    from simulations.summaries import planning
    from simulations.summaries import terminal as display

    if sweep:
        show(tools.sweep_report(recipe, overrides or ()), tools.sweep_table, as_json)
    else:
        report = planning.plan_report(recipes.load(recipe, overrides or ()))
        show(report, display.plan_table, as_json)


@app.command(rich_help_panel=_PLAN)
def schema() -> None:
    """Print the JSON schema of recipes. Editors complete and check a recipe's keys with it."""
    from simulations.config.schema import recipe_schema

    print_json(recipe_schema())


@app.command(rich_help_panel=_PLAN)
def calibrate(
    delta: Annotated[float, typer.Option(help="Target delta.")],
    steps: Annotated[int, typer.Option(help="Number of releases T.")],
    epsilon: Annotated[float | None, typer.Option(help="Target epsilon of the whole run.")] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(help="Instead of --epsilon: the noise multiplier. Its epsilon is printed."),
    ] = None,
    sampling_rate: Annotated[
        float, typer.Option(help="Probability q that a client takes part in a release.")
    ] = 1.0,
    participations: Annotated[
        int | None,
        typer.Option(
            help="Instead of --sampling-rate: each unit takes part in exactly k of the T rounds, "
            "which stay secret."
        ),
    ] = None,
    relation: Annotated[
        str, typer.Option(help="Neighbouring relation: add-remove, replace-one or zero-out.")
    ] = "add-remove",
    accountant: Annotated[str, typer.Option(help="Accountant, by its name in recipes.")] = "pld",
    as_json: JsonOption = False,
) -> None:
    """Compute the noise multiplier that meets a budget, or the epsilon of a noise multiplier."""
    from fedlgm import privacy
    from fedlgm.checks import check_positive
    from fedlgm.errors import ConfigError

    settings: dict[str, Any] = {
        "steps": steps,
        "sampling_rate": sampling_rate,
        "relation": relation,
        "accountant": accountant,
    }
    if participations is not None:
        settings |= {"sampling": "allocation", "participations": participations}
    if noise_multiplier is None and epsilon is not None:
        multiplier = privacy.calibrate(epsilon, delta, **settings)
    elif noise_multiplier is not None and epsilon is None:
        check_positive(noise_multiplier=noise_multiplier)
        multiplier = noise_multiplier
    else:
        raise ConfigError(
            "give either --epsilon or --noise-multiplier: each follows from the other"
        )
    reached = privacy.epsilon(multiplier, delta, **settings)
    drawn = (
        f"sampling rate {sampling_rate:g}" if participations is None else f"{participations} each"
    )
    taken = {name: value for name, value in settings.items() if name != "accountant"}
    rates = privacy.attack_rates(multiplier, **taken)
    if as_json:
        figures = {"noise_multiplier": multiplier, "epsilon": reached, "delta": delta, **settings}
        print_json(figures | {"attack_rates": rates.figures()})
    else:
        console.print(
            f"noise multiplier [bold]{multiplier:.6f}[/bold] gives epsilon {reached:.6f} at delta "
            f"{delta:g}"
        )
        console.print(
            f"{steps} releases, {drawn}, {relation}, {accountant} accountant",
            style="dim",
        )
        console.print(rates.sentence("units"), style="dim")


@app.command(rich_help_panel=_READ)
def export(
    run: RunArgument,
    format: Annotated[str, typer.Option(help="Format: safetensors, pt or onnx.")] = "safetensors",
    out: Annotated[
        Path | None, typer.Option(help="File or folder; by default model.FORMAT in the run folder.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters (LoRA), in peft's format.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a finished run's model to a file, with its guarantee."""
    from simulations.exports import export as exporting
    from simulations.summaries import terminal as display

    if adapter:
        from simulations.exports.adapter_files import export_adapter

        written = export_adapter(run, out)
    else:
        written = exporting.export(run, format, out)  # type: ignore[arg-type]
    show(written, display.export_table, as_json)


@app.command(rich_help_panel=_READ)
def predict(
    model: Annotated[
        Path,
        typer.Argument(help="Exported model of a table: .onnx, or a linear .safetensors or .pt."),
    ],
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="CSV file with rows to predict. It has the columns of the training table.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Predict the rows of a CSV file. Columns are matched by name and standardised as in
    training.
    """
    from simulations.exports.predict import predict as predicting

    predicted = predicting(model, file)
    if as_json:
        print_json(predicted.as_dict())
    else:
        typer.echo(predicted.frame.to_csv(index=False), nl=False)
        typer.echo(predicted.note(), err=True)


@app.command(rich_help_panel=_READ)
def ledger(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run folder. With --delta: a ledger file, such as that of a Flower app."
        ),
    ],
    delta: Annotated[
        float | None,
        typer.Option(
            help="Delta for the epsilon of a ledger file. A run's recipe states its own delta."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the charged and claimed cost of a run, release by release. The exit status is 2 if the
    ledger was changed.
    """
    from fedlgm.errors import ConfigError
    from simulations.summaries import bare_ledger, ledgers
    from simulations.summaries import terminal as display

    if run.is_file():
        show(bare_ledger.bare_ledger_report(run, delta), bare_ledger.bare_ledger_table, as_json)
        return
    if delta is not None:
        if not run.exists():
            raise ConfigError(f"there is no ledger file {run}")
        raise ConfigError(
            f"--delta is for a ledger file: the recipe of the run {run} states its delta"
        )
    summary = ledgers.ledger_report(run)
    show(summary, display.ledger_table, as_json)


@app.command(rich_help_panel=_MACHINE)
def doctor(as_json: JsonOption = False) -> None:
    """Check this machine: versions, cores, devices, data sets, noise backend."""
    from simulations.summaries import doctor as health
    from simulations.summaries import terminal as display

    findings = health.examine()
    show(findings, display.doctor_table, as_json)


tools.add_commands(app)


def main() -> None:
    """Entry point."""
    # Imports make a million objects that stay. Each garbage collection of all of them takes a tenth
    # of a second, and the collections at the end of the process take a second.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    atexit.register(gc.freeze)
    ending(lambda: app(standalone_mode=True))


if __name__ == "__main__":
    main()
