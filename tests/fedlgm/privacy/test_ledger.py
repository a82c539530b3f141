"""The ledger never shows less than was released."""

from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from dp_accounting import dp_event

from fedlgm.errors import LedgerError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import Sampling
from fedlgm.privacy import Ledger, epsilon, gaussian_epsilon
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event, repeat_event

GAUSS = dp_event.GaussianDpEvent(2.0)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.mark.parametrize("moment", ["os.fsync", "os.link"])
def test_a_ledger_is_there_whole_or_not_at_all(path, moment):
    """A run killed while it is made could not go on: an empty file may be one that was emptied."""
    program = f"""
        import os, signal, sys
        from fedlgm.privacy import Ledger
        real = {moment}
        def killed(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        {moment} = killed
        Ledger(sys.argv[1], "run")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    with Ledger(path, "run") as ledger:
        assert ledger.verify(owner="run").rows == 0


def test_the_file_has_its_owner_from_the_first_moment(path, monkeypatch):
    from fedlgm.privacy import ledger as module

    monkeypatch.setattr(module, "prepare", lambda db, path, owner: ("protects", "guarantee"))
    module.Ledger(path, "run")._db.close()
    monkeypatch.undo()
    with Ledger(path) as ledger:
        assert ledger.owner() == "run"
        assert ledger.verify(owner="run").rows == 0


def test_readers_leave_nothing_behind(path):
    with Ledger(path, "run") as ledger:
        ledger.charge(GAUSS, round=1, key="k")
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    for _ in range(2):
        with Ledger(path) as ledger:
            assert ledger.head().rows == 1
    path.with_name("other.sqlite").write_bytes(b"")
    with pytest.raises(LedgerError, match="not a fedlgm ledger"):
        Ledger(path.with_name("other.sqlite"))
    path.with_name("other.sqlite").unlink()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
    with Ledger(path, "run") as writer:
        with Ledger(path):
            pass
        writer.charge(GAUSS, round=2, key="k")  # it is still whole
        with Ledger(path) as reader:
            assert reader.verify(owner="run").rows == 2


def test_rows_add_up(path):
    with Ledger(path, "run") as ledger:
        assert ledger.epsilon(1e-5) == 0.0
        for round_ in range(1, 11):
            ledger.charge(GAUSS, round=round_, key=f"k{round_}")
        assert ledger.rounds() == 10
        assert ledger.epsilon(1e-5) == pytest.approx(epsilon(2.0, 1e-5, steps=10))
        assert ledger.epsilon(1e-5, through=4) == pytest.approx(epsilon(2.0, 1e-5, steps=4))
        assert ledger.epsilon(1e-5, "rdp") > ledger.epsilon(1e-5)
    with Ledger(path) as again:
        assert again.epsilon(1e-5) == pytest.approx(epsilon(2.0, 1e-5, steps=10))


def test_the_same_release_is_one_row_a_fresh_key_another(path):
    with Ledger(path, "run") as ledger:
        for _ in range(3):
            ledger.charge(GAUSS, round=1, key="same")
        assert len(list(ledger.charges())) == 1
        ledger.charge(GAUSS, round=1, key="fresh")
        assert ledger.epsilon(1e-5) == pytest.approx(epsilon(2.0, 1e-5, steps=2))


def test_one_key_cannot_stand_for_two_costs(path):
    """The same noise under another plan is another release: it must not vanish behind the first
    row."""
    with Ledger(path, "run") as ledger:
        ledger.charge(GAUSS, round=1, key="same")
        with pytest.raises(LedgerError, match="another"):
            ledger.charge(dp_event.GaussianDpEvent(0.5), round=1, key="same")


def test_a_charge_is_on_disk_before_anything_is_released(path):
    with Ledger(path, "run") as ledger:
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (
            2,
        )  # FULL: every commit waits for the disk


def test_many_clients_are_charged_together_or_not_at_all(path, tmp_path):
    with Ledger(path, "run") as ledger, Ledger(tmp_path / "other.sqlite", "run") as other:
        ledger.charge_each(GAUSS, round=1, keys={4: "a", 2: "b"}, protects="client, add-remove")
        for client, key in ((4, "a"), (2, "b")):
            other.charge(GAUSS, round=1, client=client, key=key, protects="client, add-remove")
        assert ledger.head() == other.head()  # row by row the same chain
        ledger.charge_each(GAUSS, round=1, keys={4: "a", 3: "c"}, protects="client, add-remove")
        before = ledger.head()
        assert before.rows == 3
        with pytest.raises(LedgerError, match="another"):
            ledger.charge_each(
                gaussian_event(3.0), round=1, keys={5: "d", 2: "b"}, protects="client, add-remove"
            )
        assert ledger.head() == before
        with pytest.raises(LedgerError, match="protect"):
            ledger.charge_each(GAUSS, round=2, keys={1: "e"}, protects="example, add-remove")
        assert ledger.verify(owner="run") == before


def test_local_trust_reports_the_worst_client(path):
    with Ledger(path, "run") as ledger:
        for round_ in range(1, 6):
            ledger.charge(GAUSS, round=round_, key=str(round_), client=0)
        ledger.charge(dp_event.GaussianDpEvent(0.8), round=1, key="x", client=1)
        ledger.charge(GAUSS, round=1, key="x", client=2)
        assert ledger.participations() == {0: 5, 1: 1, 2: 1}
        worst = max(epsilon(2.0, 1e-5, steps=5), epsilon(0.8, 1e-5, steps=1))
        assert ledger.epsilon(1e-5) == pytest.approx(worst)
        # What the server releases about everybody comes on top of each client's own.
        ledger.charge(GAUSS, round=1, key="server")
        together = [(dp_event.GaussianDpEvent(0.8), 1), (GAUSS, 1)]
        assert ledger.epsilon(1e-5) == pytest.approx(
            max(epsilon(2.0, 1e-5, steps=6), composed_epsilon(together, 1e-5))
        )


def test_rows_of_several_steps_count_every_step_for_each_client(path):
    step = gaussian_event(1.5, 0.1)
    with Ledger(path, "run") as ledger:
        for round_, clients in ((1, (0, 1)), (2, (0,))):
            for client in clients:
                ledger.charge(
                    repeat_event(step, 5), round=round_, client=client, key=f"k{round_}{client}"
                )
        spent = ledger.client_epsilons(1e-5, "rdp")
        assert spent == {
            c: composed_epsilon([(step, 5 * n)], 1e-5, "rdp") for c, n in ((0, 2), (1, 1))
        }
        assert ledger.epsilon(1e-5, "rdp") == spent[0]
        assert [charge.event for charge in ledger.charges()] == [repeat_event(step, 5)] * 3
        ledger.charge(repeat_event(gaussian_event(0.0), 5), round=3, client=1, key="open")
        assert ledger.client_epsilons(1e-5)[1] == math.inf
    assert repeat_event(step, 1) == step


def test_rows_of_an_abandoned_attempt_count_in_every_round(path):
    with Ledger(path, "run") as ledger:
        for round_ in (1, 2, 3):
            ledger.charge(
                gaussian_event(5.0), round=round_, key=f"first {round_}", claim={"epsilon": 0.1}
            )
        position = ledger.position()
        for round_ in (1, 2):
            ledger.charge(
                gaussian_event(5.0), round=round_, key=f"second {round_}", claim={"epsilon": 0.1}
            )
        four = gaussian_epsilon(math.sqrt(4) / 5.0, 1e-5)
        assert ledger.epsilon(1e-5, through=1, abandoned=position) == pytest.approx(four, rel=1e-6)
        assert ledger.epsilon(1e-5, through=1) < four
        assert ledger.claimed_epsilon(1e-5, through=1, abandoned=position) == pytest.approx(0.4)


def test_claims(path):
    with Ledger(path, "run") as ledger:
        for round_ in range(1, 5):
            ledger.charge(
                dp_event.NonPrivateDpEvent(), round=round_, key=str(round_), claim={"epsilon": 0.25}
            )
        assert ledger.epsilon(1e-5) == math.inf
        assert ledger.claimed_epsilon(1e-5) == pytest.approx(1.0)
        assert ledger.claimed_epsilon(1e-5, through=2) == pytest.approx(0.5)
    with Ledger(path.with_name("events.sqlite"), "run") as ledger:
        claim = {"event": {"type": "GaussianDpEvent", "noise_multiplier": 3.0}}
        for round_ in range(1, 5):
            ledger.charge(dp_event.NonPrivateDpEvent(), round=round_, key=str(round_), claim=claim)
        assert ledger.claimed_epsilon(1e-5) == pytest.approx(epsilon(3.0, 1e-5, steps=4))
    with Ledger(path.with_name("plain.sqlite"), "run") as ledger:
        ledger.charge(GAUSS, round=1, key="k")
        assert ledger.claimed_epsilon(1e-5) == ledger.epsilon(1e-5)


def test_sampled_and_laplace_events_survive_storage(path):
    events = [
        dp_event.PoissonSampledDpEvent(0.1, GAUSS),
        dp_event.LaplaceDpEvent(3.0),
        dp_event.NoOpDpEvent(),
        dp_event.PoissonSampledDpEvent(0.1, dp_event.LaplaceDpEvent(3.0)),
    ]
    with Ledger(path, "run") as ledger:
        for number, event in enumerate(events):
            ledger.charge(event, round=number + 1, key="k")
        assert [charge.event for charge in ledger.charges()] == events
        assert ledger.epsilon(1e-5) == pytest.approx(
            composed_epsilon([(e, 1) for e in events], 1e-5)
        )


def test_another_runs_ledger_is_refused(path):
    Ledger(path, "one").close()
    with pytest.raises(LedgerError, match="belongs to another run"):
        Ledger(path, "two")


@pytest.mark.parametrize(
    "content", [b"", b"not a database at all", b"SQLite format 3\x00" + bytes(200)]
)
def test_damage_is_reported(path, content):
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=str(path)):
        Ledger(path).epsilon(1e-5)


def test_damaged_pages_are_found(path):
    with Ledger(path, "run") as ledger:
        for round_ in range(1, 400):
            ledger.charge(GAUSS, round=round_, key="k" * 40)
    raw = bytearray(path.read_bytes())
    raw[8192:12288] = b"\xff" * 4096
    path.write_bytes(bytes(raw))
    with pytest.raises(LedgerError, match=r"damaged|cannot be used"):
        Ledger(path, "run")


def test_rows_that_are_no_events_are_reported(path):
    with Ledger(path, "run") as ledger:
        ledger.charge(GAUSS, round=1, key="k")
    with sqlite3.connect(path) as raw:
        raw.execute("""UPDATE charges SET event = '{"type": "Surprise"}'""")
    for text in ("epsilon", "claimed_epsilon"):
        with Ledger(path) as ledger, pytest.raises(LedgerError, match="cannot be used"):
            getattr(ledger, text)(1e-5)


def test_missing(path):
    with pytest.raises(LedgerError, match="no ledger at"):
        Ledger(path)
    assert not path.exists()


def test_readers_see_a_consistent_file_while_it_is_charged(path):
    writer = Ledger(path, "run")
    seen: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with Ledger(path) as reader:
                seen.append(len(list(reader.charges())))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(1, 101):
        writer.charge(GAUSS, round=round_, key="k")
    done.set()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(seen) > 3
    assert all(0 <= count <= 100 for count in seen)
    with Ledger(path) as reader:
        assert len(list(reader.charges())) == 100


def test_a_killed_process_leaves_every_row_that_it_charged(path):
    program = textwrap.dedent(
        """
        import sys
        from dp_accounting import dp_event
        from fedlgm.privacy import Ledger
        ledger = Ledger(sys.argv[1], "run")
        for round_ in range(1, 10_000):
            ledger.charge(dp_event.GaussianDpEvent(2.0), round=round_, key="k")
            print(round_, flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    last = 0
    while last < 50:
        last = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    said = [int(line) for line in process.stdout.read().split()]
    process.wait()
    with Ledger(path, "run") as ledger:
        assert ledger.rounds() >= max([last, *said])
        assert len(list(ledger.charges())) == ledger.rounds()


HOLDS = """
import sys
from fedlgm.privacy import Ledger
with Ledger(sys.argv[1], "run") as ledger, ledger.hold():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time_holds_a_ledger(path):
    """Until the other process ends, however it ends; others still read."""
    with Ledger(path, "run") as ledger:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        words = (
            f"^another run is charging the ledger {path}: wait until it ends, or name a new file$"
        )
        with pytest.raises(LedgerError, match=words), ledger.hold():
            pass
        with Ledger(path) as reader:
            assert reader.position() == 0
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with ledger.hold(), pytest.raises(LedgerError, match=words), Ledger(path, "run").hold():
            pass
        with ledger.hold():  # again
            ledger.charge(GAUSS, round=1, key="k")


def test_a_ledger_that_cannot_be_held_is_refused(path):
    with Ledger(path, "run") as ledger:
        path.with_name("ledger.sqlite.lock").mkdir()
        with (
            pytest.raises(
                LedgerError, match=r"^the ledger .* cannot be held: .*ledger.sqlite.lock"
            ),
            ledger.hold(),
        ):
            pass


class Crash(Exception):
    """Raised where a process might die."""


@pytest.mark.parametrize("trust", ["central", "local"])
def test_a_round_is_charged_before_anything_noisy_exists(federate, monkeypatch, trust):
    """The process dies when noise is about to be drawn: the charge is on disk, the release is
    not."""
    local = trust == "local"
    federation = federate(
        lambda client: torch.ones(4),
        {"a": 4},
        relation="replace-one" if local else "add-remove",
        trust=trust,
        sampling=Sampling("poisson", 5, 1.0),
    )

    def die(*arguments, **options):
        raise Crash

    monkeypatch.setattr("fedlgm.noise.run_noise.add_noise_", die)
    with pytest.raises(Crash):
        federation.run(1)
    assert not federation.records
    with Ledger(federation.ledger.path) as reader:
        rows = list(reader.charges())
    assert [row.client for row in rows] == (list(range(5)) if local else [-1])
    assert all(row.round == 1 for row in rows)


def test_failed_charges_release_nothing(federate, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "fedlgm.noise.run_noise.add_noise_",
        lambda *arguments: drawn.append(arguments) or arguments[0],
    )
    federation = federate(lambda client: torch.ones(4), {"a": 4})
    federation.run(1)
    assert len(drawn) == 1  # what is watched is where noise is drawn
    drawn.clear()
    federation.ledger.close()
    with pytest.raises(LedgerError):
        federation.run(1)
    assert not drawn


def test_fresh_keys_after_a_crash_are_a_second_release(federate):
    for seed in (1, 2):
        federation = federate(lambda client: torch.ones(4), {"a": 4}, seed=seed, owner="shared")
        federation.run(1)
        federation.ledger.close()
    with Ledger(federation.ledger.path) as reader:
        assert len(list(reader.charges())) == 2
    assert KeyRing.from_seed(None) != KeyRing.from_seed(None)
