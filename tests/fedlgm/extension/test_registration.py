"""Names of users' objects: taken once, defined again as in a notebook, and known in other
processes."""

from __future__ import annotations

from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.extension.registration import registrations
from fedlgm.noise import correlation
from fedlgm.planning import allocation
from fedlgm.training import kinds
from fedlgm_lab.audits import Subject
from simulations.config.own import Own, own_of
from tests.support.forked import run_afresh

CELL = """
from dataclasses import dataclass
from fedlgm import Guarantee, Mechanism, ReleasePlan, allocation, correlation, mechanisms
from fedlgm.training import SequentialTrainer, kinds

@dataclass(frozen=True)
class CellMechanism(Mechanism):
    def plan(self, layers, facts, transcript):
        raise NotImplementedError({version})

class CellTrainer(SequentialTrainer):
    version = {version}

def cell_rule(s, d):
    return d ** {version}

def cell_noise(rounds):
    return correlation.get("banded", rounds, bands={version})

mechanisms.register("cell-mechanism", CellMechanism)
kinds.register("cell-trainer", CellTrainer)
allocation.register("cell-rule", cell_rule)
correlation.register("cell-noise", cell_noise)
"""


def run(version: int) -> None:
    exec(CELL.format(version=version), {"__name__": "notebook"})


def test_a_cell_that_registers_may_be_run_again_and_its_last_definition_holds() -> None:
    run(1)
    run(2)
    assert allocation.shares("cell-rule", [1.0, 1.0], [1, 2]).tolist() == pytest.approx([0.2, 0.8])
    assert correlation.get("cell-noise", 4).coefficients.size == 2
    assert "cell-trainer" in kinds.names()
    with pytest.raises(NotImplementedError, match="2"):
        mechanisms.get("cell-mechanism").plan(None, None, None)


def test_other_objects_do_not_take_a_name() -> None:
    allocation.register("mine-alone", lambda s, d: d)
    with pytest.raises(
        ConfigError, match="there is an allocation 'mine-alone' already: choose another name"
    ):
        allocation.register("mine-alone", lambda s, d: d**2)
    with pytest.raises(ConfigError, match="there is a trainer 'fedprox' already"):
        kinds.register("fedprox", lambda *given, **options: None)


def test_only_registrations_from_outside_the_packages_are_recorded() -> None:
    from fedlgm.mechanisms import FlatGaussian

    run(1)
    mechanisms.register("gaussian", FlatGaussian)
    names = [given.get("name") for _, _, given in registrations()]
    assert "cell-rule" in names
    assert "gaussian" not in names
    assert len(set(names)) == len(names)


def test_an_own_object_brings_the_names_into_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(1)
    allocation.register("nameless", lambda s, d: d**0.25)
    (tmp_path / "own.pkl").write_bytes(cloudpickle.dumps(Own()))
    code = (
        "import pickle, pathlib; one, own = (pickle.loads(pathlib.Path('own.pkl').read_bytes()) "
        "for _ in range(2));from fedlgm import mechanisms; print({'cell-rule', 'nameless'} <= "
        "{*mechanisms.names()}, own)"
    )
    monkeypatch.chdir(tmp_path)
    # cloudpickle keeps the classes that it has seen.
    assert run_afresh(code, "cloudpickle") == (0, f"True {Own()}\n")


def test_an_allocation_rule_in_place_of_a_mechanism_leads_to_its_registration() -> None:
    def rule(s: np.ndarray, d: np.ndarray) -> np.ndarray:
        return d

    how = "fedlgm.allocation.register gives an allocation rule a name"
    for refused in (
        lambda: own_of({"mechanism": rule}).into({}),
        lambda: mechanisms.register("a-rule", rule),
    ):
        with pytest.raises(ConfigError, match=how):
            refused()
    with pytest.raises(
        ConfigError, match="mechanism '<rule>' is an object: register it and pass its name"
    ):
        Subject.of(rule)
