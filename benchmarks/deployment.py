"""Real nodes on this machine, compared with Flower's plain FedAvg app:
`python -m benchmarks.deployment --json`.

Both run on the same kind of deployment (TLS, authentication, one SuperNode per node), and they
alternate. Flower's app does the minimum: its ClientApp changes the received arrays slightly and
returns them, without torch and without training. fedlgm's nodes train, bound, noise, charge and
sign. The benchmark reports:

* seconds per round after the first;
* the processor time that a message takes on the node (Flower: its ClientApp process; fedlgm:
  executor and service);
* bytes on the wire as Flower counts them;
* the ledger's time per charge.

`--distributed` compares secure sums with local trust. The two alternate on the same ten nodes, with
a network of 26,010 parameters. `--as-simulated` compares a run of the recipe `distributed-digits`
on thirty real nodes with its simulation. The nodes draw their noise from the simulation's seed.
This option also reports the memory of each kind of process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.guarantee import CLIENT_DATA
from fedlgm_nodes.deploy import process_record, processes, submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.server_entry import REPORT
from fedlgm_nodes.service.ledger import NodeLedger
from simulations import launch
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines.flower_command import CONNECTION
from simulations.runs.rows import RunSummary

_SERVER = """
import json, time
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    config, stamps = context.run_config, []
    rng = np.random.default_rng(0)
    arrays = ArrayRecord([rng.standard_normal(config["parameters"]).astype(np.float32)])
    nodes = config["nodes"]
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(grid, arrays, num_rounds=config["rounds"], evaluate_fn=lambda r, a: stamps.append(time.time()))
    open(config["out"], "w").write(json.dumps(stamps))
"""
_CLIENT = """
import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    (values,) = message.content["arrays"].to_numpy_ndarrays()
    rng = np.random.default_rng(context.node_id % 2**32)
    arrays = ArrayRecord([values + np.float32(0.01) * rng.standard_normal(values.shape).astype(np.float32)])
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
"""
# Counts the processor time of every ClientApp process that SuperExec starts.
_WRAPPER = """#!/usr/bin/env bash
"{real}" "$@"
status=$?
times > "{log}.$$"  # not into a pipe: that would be another shell's
tail -n 1 "{log}.$$" >> "{log}"
rm "{log}.$$"
exit $status
"""


def plain(folder: DeploymentFolder, nodes: int, rounds: int, parameters: int) -> dict[str, Any]:
    """Measure rounds of Flower's FedAvg on unmodified SuperNodes."""
    app, out = folder.path / "app", folder.path / "stamps.json"
    if not app.exists():
        shutil.copytree(submit.APP, app)
        (app / "server_app.py").write_text(_SERVER)
        (app / "client_app.py").write_text(_CLIENT)
        text = (app / "pyproject.toml").read_text()
        text = (
            text[: text.index("deployment =")] + 'rounds = 1\nnodes = 1\nparameters = 1\nout = ""\n'
        )
        (app / "pyproject.toml").write_text(text.replace("fedlgm-nodes", "plain"))
    out.unlink(missing_ok=True)
    _cpu_log(folder).unlink(missing_ok=True)
    config = f'rounds={rounds} nodes={nodes} parameters={parameters} out="{out}"'
    flower = Flower(folder)
    run = str(flower.json("run", str(app), CONNECTION, "--run-config", config)["run-id"])
    deadline = time.monotonic() + 900
    while not out.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(flower.text("log", run, CONNECTION, "--show"))
        time.sleep(0.5)
    stamps = json.loads(out.read_text())
    seconds = np.diff(stamps)[1:].tolist()
    used = [
        _seconds(one) for line in _cpu_log(folder).read_text().splitlines() for one in line.split()
    ]
    return {
        "seconds": seconds, "cpu_per_message": sum(used) / (rounds * nodes),
        "bytes_per_message": _traffic(flower, run) / (rounds * nodes),
    }  # fmt: skip


def ours(folder: DeploymentFolder, nodes: int, recipe: recipes.Recipe) -> dict[str, Any]:
    """Measure the same number of rounds through the nodes' services."""
    before = _cpu(folder)
    result, seconds = _timed(folder, recipe)
    lines = (Path(result["run"]) / "private" / REPORT).read_text().splitlines()
    rounds = [row for row in map(json.loads, lines) if "lost" in row]
    rows = [
        json.loads(line)
        for line in (Path(result["run"]) / "metrics.jsonl").read_text().splitlines()
    ]
    lost = [one["lost"] for one in rounds if one["lost"]]
    if lost:
        raise RuntimeError(f"nodes were lost: {lost}")
    flower = Flower(folder)
    run = flower.json("list", CONNECTION)["runs"][0]["run-id"]
    return {
        "seconds": seconds[2:],
        "cpu_per_message": (_cpu(folder) - before) / (len(rounds) * nodes),
        "bytes_per_message": _traffic(flower, str(run)) / (len(rounds) * nodes),
        "rounds": len(rows),
    }


def _timed(folder: DeploymentFolder, recipe: recipes.Recipe) -> tuple[RunSummary, list[float]]:
    """Start a run; return its summary and the seconds of its rounds, of which the first includes
    the start of the run.
    """
    ends = [time.time()]

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if line.startswith("round "):  # printed after the round's model is stored
            ends.append(time.time())

    return submit.run(folder, recipe, fresh=True, say=say), np.diff(ends).tolist()


def _traffic(flower: Flower, run: str) -> float:
    traffic = flower.json("list", CONNECTION, "--run-id", run)["runs"][0]["network-traffic"]
    return float(traffic["total-bytes"])


def _cpu(folder: DeploymentFolder) -> float:
    """Return the processor seconds that all executors and services have used so far."""
    found = 0.0
    for role, (pid, *_) in process_record.read(folder).items():
        if role.endswith(("-service", "-executor")):
            times = psutil.Process(pid).cpu_times()
            found += times.user + times.system
    return found


def _cpu_log(folder: DeploymentFolder) -> Path:
    return folder.path / "clientapp-times"


def _seconds(text: str) -> float:
    minutes, _, seconds = text.partition("m")
    return 60 * float(minutes) + float(seconds.rstrip("s"))


def make_plain(folder: DeploymentFolder) -> None:
    """Turn a deployment's nodes into unmodified SuperNodes: Flower starts a ClientApp process per
    message.
    """
    wrapped = folder.path / "bin"
    wrapped.mkdir()
    (wrapped / "flwr-clientapp").write_text(
        _WRAPPER.format(real=Path(sys.executable).parent / "flwr-clientapp", log=_cpu_log(folder))
    )
    (wrapped / "flwr-clientapp").chmod(0o755)
    for node in folder.settings().nodes:
        files = folder.node(node.name)
        text = files.script("supernode").read_text()
        text = text.replace(
            " \\\n    --isolation process --superexec-auth-secret-file supernode.secret", ""
        )
        text = text.replace(
            '"$BIN/python" -m fedlgm_nodes.service.supernode', '"$BIN/flower-supernode"'
        )
        files.script("supernode").write_text(
            text.replace("exec ", f'export PATH="{wrapped}:$PATH"\nexec ')
        )
        for role in ("service", "executor"):
            files.script(role).write_text("#!/usr/bin/env bash\nexec sleep infinity\n")


def charge_times(count: int = 500) -> dict[str, float]:
    """Measure the milliseconds per charge of the ledger, including the fsync of the row and of the
    witness.
    """
    with tempfile.TemporaryDirectory(prefix="fedlgm-ledger-") as place:
        paths = Path(place) / "ledger.sqlite", Path(place) / "seen.json"
        NodeLedger.create(*paths, "data")
        taken = []
        with NodeLedger(*paths) as ledger:
            for number in range(count):
                started = time.perf_counter()
                ledger.charge(
                    f"{number}",
                    gaussian_event(2.0),
                    trust="local",
                    run="r",
                    round=number,
                    data="d",
                    protects=CLIENT_DATA,
                )
                taken.append(1000 * (time.perf_counter() - started))
    return {"median_ms": statistics.median(taken), "p99_ms": float(np.quantile(taken, 0.99))}


def measure(
    nodes: int, rounds: int, repeats: int, overrides: list[str], minutes: float
) -> dict[str, Any]:
    """Measure both apps on separate deployments. The apps alternate, so only one runs at a time.

    A repeat starts only if it would probably end within `minutes`.
    """
    started, longest = time.monotonic(), 0.0
    usual = [
        f"federation.rounds={rounds}",
        f"privacy.max_participations={rounds}",
        "federation.quorum=1.0",
        f"run.evaluate_every={rounds}",
        *overrides,
    ]
    recipe = recipes.load("nodes", usual)
    federation = recipe.federation.model_copy(update={"clients": nodes})
    parameters = Assembly(recipe.model_copy(update={"federation": federation})).model.layers.size
    found: dict[str, list[dict[str, Any]]] = {"flower": [], "fedlgm": []}
    with tempfile.TemporaryDirectory(prefix="fedlgm-bench-") as place:
        folders = {
            "flower": create(Path(place) / "flower", nodes),
            "fedlgm": create(
                Path(place) / "fedlgm", nodes, example=recipe, policy={"epsilon": 1e6}
            ),
        }
        make_plain(folders["flower"])
        for done in range(repeats):
            began = time.monotonic()
            if done and began - started + longest > 60 * minutes:
                break
            for name, folder in folders.items():
                print(f"{name} ...", file=sys.stderr, flush=True)
                try:
                    _up(folder, name)
                    if name == "flower":
                        found[name].append(plain(folder, nodes, rounds, parameters))
                    else:
                        again = recipes.load(
                            "nodes", [*usual, f"model.seed={done}"]
                        )  # see `trusts`
                        found[name].append(ours(folder, nodes, again))
                    print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
                finally:
                    processes.down(folder)
            longest = max(longest, time.monotonic() - began)
    summary: dict[str, Any] = {
        "nodes": nodes,
        "parameters": parameters,
        "rounds": rounds,
        "repeats": len(found["fedlgm"]),
    }
    for name, measured in found.items():
        summary[name] = {
            "seconds_per_round": statistics.median(s for one in measured for s in one["seconds"]),
            "cpu_seconds_per_message": statistics.median(
                one["cpu_per_message"] for one in measured
            ),
            "bytes_per_message": statistics.median(one["bytes_per_message"] for one in measured),
        }
    ratios = [
        statistics.median(a["seconds"]) / statistics.median(b["seconds"])
        for a, b in zip(found["fedlgm"], found["flower"], strict=True)
    ]
    summary["round_time_ratios"] = ratios
    summary["round_time_ratio"] = statistics.median(ratios)
    summary["load_average"] = psutil.getloadavg()
    summary["bytes_over_model"] = summary["fedlgm"]["bytes_per_message"] / (4 * parameters)
    return summary


def trusts(nodes: int, rounds: int, repeats: int, overrides: list[str]) -> dict[str, Any]:
    """Measure rounds under distributed and under local trust, which alternate on the same nodes."""
    shares = [f"distributed.threshold={2 * nodes // 3 + 1}", f"distributed.colluders={nodes // 10}"]
    usual = [
        f"federation.clients={nodes}",
        f"federation.rounds={rounds}",
        f"privacy.max_participations={rounds}",
        f"run.evaluate_every={rounds}",
        "run.seed=none",
        "model.hidden=[126,130]",
        *overrides,
    ]
    own = {"local": ["privacy.trust=local", "distributed=none"], "distributed": shares}

    def recipe(name: str, repeat: int) -> recipes.Recipe:
        """Return the recipe of a repeat, with a different initial model for each repeat.

        Nodes do not train again for a question that they have already answered.
        """
        return recipes.load("distributed-digits", [*usual, *own[name], f"model.seed={repeat}"])

    found: dict[str, list[dict[str, Any]]] = {name: [] for name in own}
    with tempfile.TemporaryDirectory(prefix="fedlgm-bench-") as place:
        policy = {"epsilon": 1e6, "trust": ["local", "distributed"]}
        folder = create(Path(place) / "lab", nodes, example=recipe("local", 0), policy=policy)
        try:
            processes.up(folder, lambda line: None)
            for repeat in range(repeats):
                for name in own:
                    found[name].append(ours(folder, nodes, recipe(name, repeat)))
                    print(f"{name}: {found[name][-1]}", file=sys.stderr, flush=True)
        finally:
            processes.down(folder)
    ratios = [
        statistics.median(a["seconds"]) / statistics.median(b["seconds"])
        for a, b in zip(found["distributed"], found["local"], strict=True)
    ]
    return {
        "nodes": nodes,
        "parameters": Assembly(recipe("local", 0)).model.layers.size,
        "rounds": rounds,
        "repeats": repeats,
        **found,
        "round_time_ratios": ratios,
        "round_time_ratio": statistics.median(ratios),
        "load_average": psutil.getloadavg(),
    }


def as_simulated(nodes: int, rounds: int, overrides: list[str]) -> dict[str, Any]:
    """Return whether real nodes and the simulation give the same model under distributed trust, and
    the memory of the processes.
    """
    usual = [
        f"federation.rounds={rounds}",
        f"privacy.max_participations={rounds}",
        f"federation.clients={nodes}",
    ]
    recipe = recipes.load("distributed-digits", [*usual, *overrides])
    figures = ("model_sha256", "accuracy", "epsilon", "readers_epsilon")
    with tempfile.TemporaryDirectory(prefix="fedlgm-bench-") as place:
        policy = {"epsilon": 1e6, "trust": ["distributed"]}
        folder = create(
            Path(place) / "lab", nodes, example=recipe, policy=policy, test_seed=recipe.run.seed
        )
        try:
            processes.up(folder, lambda line: print(line, file=sys.stderr, flush=True))
            memory = _memory(folder)
            real, seconds = _timed(folder, recipe)
        finally:
            processes.down(folder)
        simulated = launch.simulate(recipe, engine="local", run_dir=Path(place) / "simulated")
    both = [{name: dict[str, Any](run)[name] for name in figures} for run in (real, simulated)]
    return {
        "nodes": nodes,
        "rounds": rounds,
        "real": both[0],
        "simulated": both[1],
        "equal": both[0] == both[1],
        "seconds": seconds,
        "megabytes": memory,
        "load_average": psutil.getloadavg(),
    }


def _memory(folder: DeploymentFolder) -> dict[str, float]:
    """Return the mean proportional set size of each kind of process with its children, in MB."""
    found: dict[str, list[float]] = {}
    for role, (pid, *_) in process_record.read(folder).items():
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        found.setdefault(role.rsplit("-", 1)[-1], []).append(
            sum(one.memory_full_info().pss for one in family) / 1e6
        )
    return {kind: statistics.fmean(sizes) for kind, sizes in found.items()}


def _up(folder: DeploymentFolder, name: str) -> None:
    if name == "fedlgm":
        processes.up(folder, lambda line: None)
        return
    answers, processes._answers = (
        processes._answers,
        lambda *_: True,
    )  # these nodes have no services
    try:
        processes.up(folder, lambda line: None)
    finally:
        processes._answers = answers


def main() -> None:
    """Run the benchmark that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nodes",
        type=int,
        help="number of nodes; default: 3, or 10 with --resnet18 or --distributed, or 30 with "
        "--as-simulated",
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start a repeat only if it would end within these minutes",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        help="section.key=value of the recipe `nodes`",
    )
    parser.add_argument(
        "--resnet18",
        action="store_true",
        help="train ResNet-18 on two examples for each node, instead of a small network",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="compare distributed with local trust, on ten nodes",
    )
    parser.add_argument(
        "--as-simulated", action="store_true", help="compare thirty real nodes with the simulation"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.as_simulated:
        found = as_simulated(options.nodes or 30, options.rounds, options.overrides)
        print(
            json.dumps(found)
            if options.json
            else "one model"
            if found["equal"]
            else "different models"
        )
        return
    if options.distributed:
        found = trusts(options.nodes or 10, options.rounds, options.repeats, options.overrides)
        ratio = f"a round takes {found['round_time_ratio']:.2f} of one under local trust {found['round_time_ratios']}"
        print(json.dumps(found) if options.json else ratio)
        return
    nodes, overrides = options.nodes or (10 if options.resnet18 else 3), options.overrides
    if options.resnet18:
        overrides = [
            "data={name='synthetic-20', partition='iid'}",
            "model={name='resnet18'}",
            "training.epochs=1",
            *overrides,
        ]
    result = measure(nodes, options.rounds, options.repeats, overrides, options.minutes) | {
        "ledger_charge": charge_times()
    }
    if options.json:
        print(json.dumps(result))
        return
    for name in ("flower", "fedlgm"):
        one = result[name]
        print(
            f"{name:8} {one['seconds_per_round']:7.2f} s per round   "
            f"{one['cpu_seconds_per_message']:6.2f} CPU-s and "
            f"{one['bytes_per_message'] / 1e6:.2f} MB per message"
        )
    print(
        f"round time {result['round_time_ratio']:.2f} of Flower's; "
        f"{result['bytes_over_model']:.2f} model sizes on the wire per message; a charge takes "
        f"{result['ledger_charge']['median_ms']:.1f} ms (p99 "
        f"{result['ledger_charge']['p99_ms']:.1f} ms)"
    )


if __name__ == "__main__":
    main()
