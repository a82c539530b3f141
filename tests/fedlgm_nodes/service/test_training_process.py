"""The service holds no torch, no data and no accountant: processes that it starts do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fedlgm import privacy
from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm.privacy.guarantee import CLIENT_DATA as CLIENT
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.service import accounting_process, child, training_process
from fedlgm_nodes.service.account import Account
from fedlgm_nodes.service.accounting_process import AccountingProcess
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.request import Request
from fedlgm_nodes.service.service import Service
from fedlgm_nodes.service.training_process import TrainingProcess, _Answers
from fedlgm_nodes.service.work import Work
from tests.support import nodes
from tests.support.nodes import (
    NodeProcess,
    ask,
    edit,
    hello,
    make_node,
    numbers,
    plan,
    rows,
    served,
)
from tests.support.patience import wait_until

MOST_MIB = 60
SERVE = "import sys; from simulations.entry import main; sys.exit(main())"


class ForkedTraining:
    """A training process forked from the service's, so that faults of a test are in both."""

    def __init__(self, link: Any) -> None:
        service = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.closerange(3, link.fileno())  # the ledger's lock, and the service's own end
                os.closerange(link.fileno() + 1, 1 << 16)
                signal.set_wakeup_fd(-1)
                child.answer(link, service, _Answers())
            finally:
                os._exit(0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        return 0


@pytest.fixture(autouse=True)
def _forked(monkeypatch):
    monkeypatch.setattr(training_process, "start", ForkedTraining)


def resident(pid: int) -> int:
    """Resident memory of a process, MiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def training_of(pid: int) -> list[int]:
    """Training processes of a service that are alive."""
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return [child for child in children if resident(child)]


def test_a_service_that_has_trained_holds_no_torch(tmp_path):
    folder = make_node(tmp_path / "node")
    log = (tmp_path / "log").open("wb")
    service = subprocess.Popen(
        [sys.executable, "-c", SERVE, "node", "serve", str(folder.path)], stdout=log, stderr=log
    )
    try:
        wait_until(lambda: folder.socket.exists() or service.poll() is not None)
        assert hello(folder)["ok"]
        assert ask(folder)[0]["ok"]
        assert psutil.Process(service.pid).memory_full_info().pss <= MOST_MIB << 20
        maps = Path(f"/proc/{service.pid}/maps").read_text()
        assert "libtorch" not in maps
        assert "/scipy/" not in maps
        started = training_of(service.pid)
        assert len(started) == 2
        service.kill()
        wait_until(lambda: not any(map(resident, started)))
    finally:
        service.kill()
        service.wait()
    assert [row.round for row in rows(folder)] == [1]


def test_an_idle_training_process_ends_and_the_next_question_starts_another(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, "training_idle_seconds = 300.0", "training_idle_seconds = 1.0")
    with NodeProcess(folder) as service:
        for round_ in (1, 2):
            wait_until(lambda: not psutil.Process(service.pid).children())  # nor a zombie
            assert hello(folder)["ok"]
            assert not training_of(service.pid)
            assert ask(folder, round=round_)[0]["ok"]
            assert len(training_of(service.pid)) == 1
    assert [row.round for row in rows(folder)] == [1, 2]


@pytest.mark.parametrize("often", [1, 2])
def test_a_release_whose_training_was_killed_is_made_again_and_charged_once(tmp_path, often):
    """With the same noise: whoever sees both answers learns nothing from the second."""
    undisturbed, folder = make_node(tmp_path / "a", test_seed=7), tmp_path / "b" / "node"
    folder.parent.mkdir()
    disturbed = make_node(folder, test_seed=7)
    (tmp_path / "a.npz").rename(disturbed.path.with_name("node.npz"))
    nodes.write_data(tmp_path / "a.npz")
    deaths = tmp_path / "deaths"

    def before() -> None:
        make = Releaser.make

        def dying(*given: object) -> object:
            with deaths.open("a") as file:
                file.write("x")
            if len(deaths.read_text()) <= often:
                os.kill(os.getpid(), signal.SIGKILL)
            return make(*given)  # type: ignore[arg-type]

        Releaser.make = dying  # type: ignore[assignment, method-assign]

    with served(undisturbed):
        _, expected = ask(undisturbed)
    with NodeProcess(disturbed, before):
        header, body = ask(disturbed)
        assert header["ok"] == (often == 1)
        if often > 1:  # one sentence, and the same question gives the answer
            assert header["code"] == "failed"
            header, body = ask(disturbed)
        assert header["ok"]
    assert (numbers(body) == numbers(expected)).all()
    assert len(rows(disturbed)) == 1
    assert "the training process has ended" in (tmp_path / "b/node.log").read_text()


def test_data_that_change_between_training_processes_are_other_data(tmp_path):
    """They have another name, and so other noise: the difference of the answers would show what
    has changed."""
    folder = make_node(tmp_path / "node")
    with NodeProcess(folder) as service:
        first, _ = ask(folder)
        again, _ = ask(folder)
        nodes.write_data(tmp_path / "node.npz", nodes.EXAMPLES - 1)
        assert ask(folder)[0]["seq"] == first["seq"] == again["seq"]  # it was read once
        (training,) = training_of(service.pid)
        os.kill(training, signal.SIGKILL)
        changed, _ = ask(folder)
    assert changed["seq"] == 2
    charged = rows(folder)
    assert charged[0].data != charged[1].data


def test_a_release_is_not_made_from_other_data_than_it_was_charged_for(tmp_path):
    """The data change, and the training process dies, between the charge and the release."""
    folder = make_node(tmp_path / "node")

    def before() -> None:
        def dying(*_: object) -> None:
            nodes.write_data(tmp_path / "node.npz", nodes.EXAMPLES - 1)
            os.kill(os.getpid(), signal.SIGKILL)

        Releaser.make = dying  # type: ignore[assignment, method-assign]

    with NodeProcess(folder, before):
        assert ask(folder)[0]["code"] == "failed"
    assert "the node's data have changed while" in folder.path.with_name("node.log").read_text()
    assert len(rows(folder)) == 1


def test_a_question_outlives_a_version_of_torch_and_is_charged_once(tmp_path):
    """Answered or not: what has left is sent again as it was, and nothing else is made again."""
    folder = make_node(tmp_path / "node")

    def later(name: str) -> Callable[[], None]:
        return lambda: setattr(torch, "__version__", name)

    def dying() -> None:
        Service._keep = lambda *_: nodes.die()  # type: ignore[assignment, method-assign]

    with served(folder):
        header, body = ask(folder)
    with NodeProcess(folder, later("later")):
        again, repeated = ask(folder)
        assert (again["seq"], again["replayed"], repeated) == (header["seq"], True, body)
    with NodeProcess(folder, dying), pytest.raises(RunError):
        ask(folder, round=2)  # charged, and nothing has left
    with NodeProcess(folder, later("latest")):
        assert ask(folder, round=2)[0]["seq"] == 2
    assert [row.round for row in rows(folder)] == [1, 2]


def test_the_code_of_a_model_cannot_release_under_another_charge(tmp_path):
    """It fails in a release that was charged for much noise, and gives its name to the next."""
    folder = make_node(tmp_path / "node")
    told = tmp_path / "name"

    def before() -> None:
        make = Releaser.make

        def hostile(self: Releaser, request: object, name: str) -> object:
            if not told.exists():
                told.write_text(name)
                raise RuntimeError
            return make(self, request, name)  # type: ignore[arg-type]

        def names(*_: object) -> object:
            return {"name": told.read_text() if told.exists() else "a", "lasting": "b"}, b""

        Releaser.make = hostile  # type: ignore[assignment, method-assign]
        _Answers.names = names  # type: ignore[attr-defined]

    with NodeProcess(folder, before):
        assert ask(folder, text=plan(40.0).to_json())[0]["code"] == "failed"
        assert ask(folder, text=plan(4.0).to_json())[0]["seq"] == 2
    assert len({row.event for row in rows(folder)}) == 2


@pytest.mark.parametrize(
    ("kind", "raised"), [("ConfigError", ConfigError), ("annotations", RunError), ("", RunError)]
)
def test_an_error_of_the_training_process_is_one_short_line(tmp_path, kind, raised):
    folder = make_node(tmp_path / "node")
    training = TrainingProcess(folder, folder.policy(), lambda: False)
    training._link, theirs = Pipe()
    theirs.send_bytes(frames.encode({"error": [kind, "of the model\n" + "x" * 5000]}))
    with pytest.raises(raised, match=r"^of the model\?x{980,1000}$") as error:
        training._exchange("prepare")
    assert type(error.value) is raised


def test_a_killed_accounting_process_is_started_again_and_prices_the_same(tmp_path, monkeypatch):
    """And it refuses a ledger that is not the service's: another file in its place, or more rows."""
    launched: list[subprocess.Popen[bytes]] = []

    def start(link: Any) -> Any:
        launched.append(child.start(accounting_process.__name__, link))  # type: ignore[arg-type]
        return launched[-1]

    monkeypatch.setattr(accounting_process, "start", start)
    folder = make_node(tmp_path / "node")
    request = Request(1, plan(), "", nodes.MODEL.numpy(), Work.model_validate(nodes.WORK))
    with folder.ledger() as ledger:
        own = Account(folder.policy(), ledger)
        process = AccountingProcess(folder, folder.policy(), ledger)
        expected = privacy.events.encode(own.price("run", 1, request))
        assert process.price("run", 1, request) == expected
        launched[-1].kill()
        assert process.price("run", 1, request) == expected == process.cost(request)
        assert len(launched) == 2
        terms: Any = {"trust": "local", "run": "run", "round": 1, "data": "d", "protects": CLIENT}
        ledger.charge("a", expected, **terms)
        assert process.epsilon() == own.epsilon() > 0.0
        for number in range(2, 15):
            ledger.charge(f"{number}", expected, **terms)
        with pytest.raises(Refusal, match="budget"):
            process.price("run", 15, request)
        assert process.epsilon() == own.epsilon()
        ledger.head = "ab" * 32
        with pytest.raises(LedgerError, match="not the one that the service holds"):
            process.cost(request)
        process.close()
        launched[-1].wait()
