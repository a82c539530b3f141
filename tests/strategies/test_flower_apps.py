"""Apps in the style of Flower's examples run as they are, and private after a few changed lines.

`tests/flower_apps` holds the apps as a Flower user has them; `CHANGES` has all that fedlgm asks
for."""

from __future__ import annotations

import difflib
import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import joblib
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from sklearn.datasets import load_iris

from fedlgm.privacy.ledger import Ledger
from simulations.engines.grid import WorkerGrid

APPS = Path(__file__).parents[1] / "flower_apps"
BUDGET = 'epsilon=8, delta=1e-2, clients=4, rounds=num_rounds, ledger="ledger.sqlite"'
CLIENT = "from flwr.clientapp import ClientApp\n", "from clients import PrivateClientApp\n"
SERVER = "from flwr.serverapp.strategy import FedAvg\n", "from strategies import PrivateFedAvg\n"
CHANGES = {
    "quickstart_pytorch": {
        "client_app.py": [CLIENT, ("app = ClientApp()", "app = PrivateClientApp(Net())")],
        "server_app.py": [
            SERVER,
            (
                "FedAvg(fraction_evaluate=fraction_evaluate)",
                f"PrivateFedAvg(global_model, {BUDGET})",
            ),
        ],
    },
    "quickstart_sklearn": {
        "client_app.py": [
            CLIENT,
            (
                "app = ClientApp()",
                "app = PrivateClientApp(get_model_params(create_log_reg_and_instantiate_parameters()))",
            ),
        ],
        "server_app.py": [
            SERVER,
            (
                "FedAvg(fraction_train=1.0, fraction_evaluate=1.0)",
                f"PrivateFedAvg(get_model_params(model), {BUDGET})",
            ),
        ],
    },
    "quickstart_huggingface": {
        "client_app.py": [
            CLIENT,
            ("app = ClientApp()", 'app = PrivateClientApp(get_model("bert-tiny"))'),
        ],
        "server_app.py": [
            SERVER,
            ("    strategy = FedAvg(\n", ""),
            ("        fraction_train=fraction_train,\n", ""),
            ("        fraction_evaluate=fraction_evaluate,\n    )\n", ""),
            (
                "    result = strategy.start(\n",
                f"    strategy = PrivateFedAvg(model, {BUDGET})\n    result = strategy.start(\n",
            ),
        ],
    },
    "advanced_pytorch": {
        "client_app.py": [CLIENT, ("app = ClientApp()", "app = PrivateClientApp(Net())")],
        "strategy.py": [
            (
                "from flwr.serverapp.strategy import FedAvg, Result\n",
                (
                    "from flwr.serverapp.strategy import Result\nfrom strategies import "
                    "PrivateFedAvg\n"
                ),
            ),
            ("class CustomFedAvg(FedAvg)", "class CustomFedAvg(PrivateFedAvg)"),
        ],
        "server_app.py": [
            ("CustomFedAvg(fraction_train=fraction_train)", f"CustomFedAvg(global_model, {BUDGET})")
        ],
    },
}
CONFIG = {
    "num-server-rounds": 3,
    "fraction-evaluate": 0.0,
    "fraction-train": 1.0,
    "learning-rate": 0.1,
    "batch-size": 16,
    "local-epochs": 1,
    "model-name": "bert-tiny",
}


class Nodes(WorkerGrid):
    """Four nodes in this process, each with a context that lasts as long as the run."""

    def __init__(self, app, config: dict) -> None:
        super().__init__(workers=4)
        self._app = app
        self._contexts = {
            node: Context(1, node, {"partition-id": i, "num-partitions": 4}, RecordDict(), config)
            for i, node in enumerate(self.get_node_ids())
        }

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            yield self._app(message, self._contexts[message.metadata.dst_node_id])


def changed(name: str, folder: Path) -> int:
    """Make the app in `folder` private, and count the lines that this takes: the longer side of
    every difference."""
    lines = 0
    for file, pairs in CHANGES[name].items():
        path = folder / name / file
        old = new = path.read_text()
        for before, after in pairs:
            assert new.count(before) == 1, (file, before)
            new = new.replace(before, after)
        path.write_text(new)
        steps = difflib.SequenceMatcher(
            None, old.splitlines(), new.splitlines(), autojunk=False
        ).get_opcodes()
        lines += sum(max(b - a, d - c) for kind, a, b, c, d in steps if kind != "equal")
    return lines


@pytest.fixture
def started(tmp_path, monkeypatch):
    """A function that runs an app in an empty folder and returns that folder."""

    def start(name: str, private: bool) -> Path:
        folder = tmp_path / ("private" if private else "plain")
        shutil.copytree(APPS / name, folder / name)
        if private:
            lines = changed(name, folder)
            print(f"{name}: {lines} lines changed")
            assert lines <= 8
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        for number in (
            "_run_id",
            "_node_id",
            "_task_id",
        ):  # FedAvg makes messages only within a run
            monkeypatch.setattr(TaskIdentity, number, 1)
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        torch.manual_seed(0)
        client, server = (
            importlib.import_module(f"{name}.{part}").app for part in ("client_app", "server_app")
        )
        server(Nodes(client, CONFIG), Context(1, 1, {}, RecordDict(), CONFIG))
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        return folder

    return start


def _of_torch(folder: Path) -> None:
    state = torch.load(folder / "final_model.pt")
    assert all(bool(torch.isfinite(value).all()) for value in state.values())


def _quickstart(folder: Path) -> None:
    """The server evaluated the initial model and every round's."""
    _of_torch(folder)
    rows = [line.split() for line in (folder / "evaluated.txt").read_text().splitlines()]
    assert [int(round_) for round_, _ in rows] == [0, 1, 2, 3]
    assert len({accuracy for _, accuracy in rows}) > 1


def _sklearn(folder: Path) -> None:
    model = joblib.load(folder / "logreg_model.pkl")
    assert model.coef_.any()
    assert model.predict(load_iris().data).shape == (150,)


def _custom(folder: Path) -> None:
    """The strategy's own loop kept its metrics and its best model."""
    _of_torch(folder)
    assert [row["round"] for row in json.loads((folder / "results.json").read_text())] == [1, 2, 3]
    assert set(torch.load(folder / "best_model.pt")) == {
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    }


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("quickstart_pytorch", _quickstart),
        ("quickstart_sklearn", _sklearn),
        ("advanced_pytorch", _custom),
        pytest.param("quickstart_huggingface", _of_torch, marks=pytest.mark.slow),
    ],
)
def test_an_app_runs_as_it_is_and_becomes_private_by_at_most_eight_lines(
    name, check, started, capsys
):
    check(started(name, private=False))
    folder = started(name, private=True)
    assert (
        sum("fedlgm: epsilon " in line for line in capsys.readouterr().out.splitlines()) == 1
    )  # own `start`s, too
    check(folder)
    with Ledger(folder / "ledger.sqlite") as ledger:
        assert ledger.rounds() == 3
        assert 7 < ledger.epsilon(1e-2) <= 8
