"""The run's objects for the Flower app's two files, built from Flower's run config.

`nodes` in the run config states the kind of nodes: "clients" (the default: each node is one client,
named by its own node config) or "workers" (a simulation, in which any node serves any client). It
is never inferred from the nodes' statements.
"""

from __future__ import annotations

import pickle
import warnings
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from clients import AnyClient, LayerwiseClient, OneClient, published_client
from clients.flower_private import wait_by_steady_clock
from clients.layerwise import place_reply
from clients.mod import node_keys
from clients.replying import ReplyingApp
from clients.serving import Serving
from fedlgm.errors import ConfigError, FedlgmError, Notice
from fedlgm.noise.keys import KeyRing
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.headline import headline
from simulations.runs.rows import FullRow
from simulations.runs.server import TEST_MODE, nodes_of, serve


def make_server_app() -> ServerApp:
    """ServerApp that runs the recipe named in the run config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        wait_by_steady_clock()
        path = str(context.run_config.get("run-dir", ""))
        given = Path(path) if path else None
        if given is not None and not given.is_absolute():
            raise FedlgmError(
                f"run-dir must be an absolute path, got {path!r}: this process does not run where "
                "you are"
            )
        asked = resolve_hardware(_recipe(context.run_config))
        if given is not None and (given / "recipe.toml").is_file():
            folder = RunFolder.open(given)
            recipe = folder.recipe()
            if recipe != asked:
                raise FedlgmError(
                    f"the run in {given} has a different recipe from the run config, and its "
                    "clients would train by the run config: pass "
                    f"recipe='{given / 'recipe.toml'}', or the recipe "
                    "and set that the run was started with"
                )
        else:
            recipe = asked
            _require_nodes(recipe, context.run_config)
            Assembly(recipe).model.check()
            made = new_folder.create(given, recipe)
            folder = RunFolder(made.path.resolve(), made.made_with)
        with new_folder.removed_if_refused(folder):
            assembly = Assembly(recipe, _own(context.run_config))
            config = context.run_config
            nodes = nodes_of(
                assembly,
                _kind(config),
                simulated=_is_simulated(config),
                keyed=bool(config.get("keys")),
            )
            result = serve(grid, assembly, folder, "flower", print_row, nodes=nodes)
        name, value = headline(result)
        print(
            f"{name} {value:.4f}, epsilon {result['epsilon']:.3f}, run folder {folder.path}\n"
            f"{result['guarantee']}\nledger head {result['ledger_head']}",
            flush=True,
        )

    return app


def make_client_app() -> ClientApp:
    """ClientApp for the node's partition, or for any client if a node serves several."""
    app = ReplyingApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        # Answered without model and data, which take seconds to load.
        return place_reply(message, _serves(context, _recipe(context.run_config)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _client(context).train(message, context)

    @app.train("norms")
    def train_norms(message: Message, context: Context) -> Message:
        return published_client.train_norms(_client(context), message, context)

    return app


def print_row(row: FullRow) -> None:
    """Print one line per round to Flower's log, which belongs to the operator."""
    figures = ""
    if "loss" in row:
        name, value = headline(row)
        figures = f" {name} {value:.4f} epsilon {row['epsilon']:.3f}"
    print(
        f"round {row['round']}: {row['cohort']} clients, {row['seconds']:.2f} s{figures}",
        flush=True,
    )


def _recipe(config: UserConfig) -> Recipe:
    overrides = [part for part in str(config.get("set", "")).split(";") if part.strip()]
    _own(config)  # this loads names that users have registered and that the recipe may use
    recipe = recipes.load(str(config.get("recipe", "")) or None, overrides)
    if recipe.training.kernel == "auto":  # every node has PyTorch
        recipe = recipe.with_values(training={"kernel": None})
    if recipe.training.undecided:
        raise ConfigError(
            "training.vectorize = 'auto' and training.compile = 'auto' are resolved when `fedlgm "
            "simulate` starts a run: set 'on' or 'off', true or false"
        )
    return recipe


def _kind(config: UserConfig) -> str:
    kind = str(config.get("nodes", "clients"))
    if kind not in ("clients", "workers"):
        raise ConfigError(
            "nodes must be 'clients' (one node per client) or 'workers' (a simulation), got "
            f"{kind!r}"
        )
    return kind


def _require_nodes(recipe: Recipe, config: UserConfig) -> None:
    """Refuse a simulation whose run config does not declare it."""
    real = _kind(config) == "clients" and not _is_simulated(config)
    if real and recipe.run.seed is not None and not recipe.run.test_mode:
        raise ConfigError(
            f"the recipe {recipe.name!r} has a public seed, which real nodes refuse: for a "
            "simulation add "
            'nodes="workers" to --run-config; for real nodes leave the seed out with '
            'set="run.seed=none"'
        )


def _is_simulated(config: UserConfig) -> bool:
    return bool(config.get("simulated", False))


def _serves(context: Context, recipe: Recipe) -> Serving:
    if _kind(context.run_config) == "workers":
        return AnyClient()
    recipe.protects.check_nodes(recipe.federation.sampling == "allocation")
    simulated = _is_simulated(context.run_config)
    if recipe.run.test_mode and recipe.run.seed is not None and not simulated:
        warnings.warn(Notice(TEST_MODE), stacklevel=2)
    return OneClient.of_node(
        context.node_config, recipe.federation.clients, simulated or recipe.run.test_mode
    )


def _client(context: Context) -> LayerwiseClient:
    config = context.run_config
    recipe = _recipe(config)
    return _build_client(
        str(config.get("recipe", "")),
        str(config.get("set", "")),
        _serves(context, recipe),
        None if recipe.run.seed is not None else _secret(context),
        str(config.get("objects", "")) if _is_simulated(config) else "",
    )


@lru_cache(maxsize=1)
def _build_client(
    recipe: str, overrides: str, serves: Serving, secret: int | None, objects: str
) -> LayerwiseClient:
    # Simulated clients share a process: model and data are made once in it.
    given: UserConfig = {"recipe": recipe, "set": overrides, "objects": objects, "simulated": True}
    parsed, user_objects = _recipe(given), _own(given)
    keys = KeyRing.from_seed(parsed.run.seed) if secret is None else KeyRing(secret, secret=True)
    return Assembly(parsed, user_objects).client(keys, serves)


def _own(config: UserConfig) -> Own:
    """Objects from the driver of a simulation on this machine; a real node reads none."""
    path = str(config.get("objects", ""))
    return _unpickle(path) if path and _is_simulated(config) else Own()


@lru_cache(maxsize=1)
def _unpickle(path: str) -> Own:
    user_objects: Own = pickle.loads(Path(path).read_bytes())
    return user_objects


def _secret(context: Context) -> int:
    """Root of the keys of a node without a seed. A simulation takes the root from the run's folder;
    a real node keeps it in its own state.
    """
    folder = str(context.run_config.get("keys", ""))
    if folder:
        return RunFolder.open(Path(folder)).keys(None)[0].root
    return node_keys(context).root
