"""What the Flower app's two files load: the run's objects, built from Flower's run config."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import LayerwiseClient
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.keys import KeyRing
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly, settled
from simulations.config.recipe import Recipe
from simulations.launch import default_folder
from simulations.runs.folder import RunFolder
from simulations.runs.server import serve


def make_server_app() -> ServerApp:
    """ServerApp that runs the recipe named in the run config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        path = str(context.run_config.get("run-dir", ""))
        given = Path(path) if path else None
        if given is not None and not given.is_absolute():
            raise FedlgmError(
                f"run-dir must be an absolute path, got {path!r}: this process does not run where you are"
            )
        if given is not None and (given / "recipe.toml").is_file():
            folder = RunFolder.open(given)
            recipe = folder.recipe()
            if recipe != settled(_recipe(context.run_config)):
                raise FedlgmError(
                    f"the run in {given} has another recipe than the run config: its clients would train by theirs; "
                    f"say recipe='{given / 'recipe.toml'}', or the recipe and set that the run was started with"
                )
        else:
            recipe = settled(_recipe(context.run_config))
            folder = RunFolder.create(given or default_folder(recipe).resolve(), recipe)
        result = serve(grid, Assembly(recipe), folder, KeyRing.from_seed(recipe.run.seed), "flower", print_row)
        print(
            f"accuracy {result['accuracy']:.4f}, epsilon {result['epsilon']:.3f}, run folder {folder.path}", flush=True
        )

    return app


def make_client_app() -> ClientApp:
    """ClientApp that stands for the node's partition, or for any client where a node serves several."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return LayerwiseClient.query(message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _client(context.run_config).train(message, context)

    @app.train("norms")
    def train_norms(message: Message, context: Context) -> Message:
        return _client(context.run_config).train_norms(message, context)

    return app


def print_row(row: dict[str, float]) -> None:
    """One line a round for Flower's log."""
    figures = f" accuracy {row['accuracy']:.4f} epsilon {row['epsilon']:.3f}" if "accuracy" in row else ""
    print(f"round {row['round']}: {row['cohort']} clients, {row['seconds']:.2f} s{figures}", flush=True)


def _recipe(config: UserConfig) -> Recipe:
    overrides = [part for part in str(config.get("set", "")).split(";") if part.strip()]
    recipe = recipes.load(str(config.get("recipe", "")) or None, overrides)
    if "auto" in (recipe.training.vectorize, recipe.training.compile):
        raise ConfigError(
            "training.vectorize = 'auto' and training.compile = 'auto' are settled by a measurement that only "
            "`fedlgm simulate` makes: say 'on' or 'off', true or false"
        )
    return recipe


def _client(config: UserConfig) -> LayerwiseClient:
    return _built(str(config.get("recipe", "")), str(config.get("set", "")))


@lru_cache(maxsize=1)
def _built(recipe: str, overrides: str) -> LayerwiseClient:
    # Simulated clients share a process: model and data are made once in it.
    parsed = _recipe({"recipe": recipe, "set": overrides})
    return Assembly(parsed).client(KeyRing.from_seed(parsed.run.seed))
