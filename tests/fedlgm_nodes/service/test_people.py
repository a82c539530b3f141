"""People whose rows lie at several nodes count at one of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.errors import ConfigError, DataError
from fedlgm_nodes.policy import Data
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.people import Counted
from tests.support import nodes
from tests.support.nodes import ask, edit, make_node, numbers, refused, rows, served

PIXELS = [f"p{i}" for i in range(16)]
PEOPLE = {"column": "person", "elsewhere": "elsewhere.txt"}
ASKED = nodes.WORK | {"people": True}


def pseudonym(person: object) -> str:
    return hashlib.sha256(f"salt {person}".encode()).hexdigest()


def write_table(file: Path, people: list[Any], values: np.ndarray | None = None) -> None:
    """A row for each entry; the row of a person is the same in every table."""
    x = np.array([np.random.default_rng(int(person)).random(16) for person in people])
    x = x if values is None else values
    table = pandas.DataFrame(x.reshape(-1, 16), columns=PIXELS)
    table["label"] = [int(person) % 3 for person in people]
    table["person"] = [pseudonym(person) for person in people]
    table.to_csv(file, index=False)


def write_list(file: Path, people: Any) -> None:
    file.write_text("".join(f"{pseudonym(person)}\n" for person in people))


def make(path: Path, people: list[Any], elsewhere: Any, **values: Any) -> NodeFolder:
    """A node whose table has a row of each of these people."""
    usual = {"kind": "csv", "labels": "label", "features": PIXELS, "people": PEOPLE}
    folder = make_node(path, **(usual | values))
    edit(folder, f"../{path.name}.npz", f"../{path.name}.csv")
    write_table(path.with_name(f"{path.name}.csv"), people)
    write_list(path / "elsewhere.txt", elsewhere)
    return folder


def section(**values: Any) -> Data:
    usual = {"name": "d", "kind": "csv", "path": "t.csv", "labels": "label", "shape": (16,)}
    return Data.model_validate(usual | {"classes": 3, "people": PEOPLE} | values)


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.randoms(use_true_random=False))
def test_no_number_depends_on_the_rows_of_people_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, here: set[int], elsewhere: set[int], order: Any
) -> None:
    folder, here = tmp_path_factory.mktemp("p"), (here - elsewhere) | {99}
    write_list(folder / "elsewhere.txt", sorted(elsewhere))
    write_table(folder / "t.csv", sorted(here))
    alone, counted = node_data.read_with_people(section(), folder)
    # Their rows, with any numbers, between those of the others.
    mixed = sorted([*here, *(person for person in elsewhere for _ in range(2))])
    x = np.array([np.random.default_rng(person).random(16) for person in mixed])
    x[[person in elsewhere for person in mixed]] *= order.choice([0.0, 1e30, -7.0])
    write_table(folder / "t.csv", mixed, x)
    shuffled = order.sample(sorted(elsewhere), len(elsewhere))
    write_list(folder / "elsewhere.txt", shuffled)
    again, counted_again = node_data.read_with_people(section(features=()), folder)
    assert node_data.digest(again) == node_data.digest(alone)
    assert counted is not None
    assert counted_again is not None
    assert counted_again.digest == counted.digest
    assert counted_again.here == counted.here == {pseudonym(person) for person in here}


def test_a_pseudonym_of_digits_alone_is_text(tmp_path):
    number = "1" * 63 + "2"
    frame = pandas.DataFrame({name: [0.5, 1.5] for name in PIXELS} | {"label": [0, 1]})
    frame["person"] = [number, "1" * 64]
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "elsewhere.txt").write_text(number)
    assert len(node_data.read(section(), tmp_path)) == 1


@pytest.mark.parametrize(
    ("listed", "people", "message"),
    [
        (None, None, "there is no file .*elsewhere.txt: list there the pseudonyms"),
        ("ann\n", None, "elsewhere.txt: entry 0, counted from 0, is not a pseudonym"),
        (pseudonym(1).upper(), None, "is not a pseudonym of 64 hexadecimal digits in lower case"),
        ("", ["ann", pseudonym(2)], "column 'person': entry 0"),
        ("", [pseudonym(2), None], "column 'person': entry 1"),
    ],
)
def test_what_could_make_two_people_of_one_is_refused(tmp_path, listed, people, message):
    write_table(tmp_path / "t.csv", [1, 2])
    if people is not None:
        frame = pandas.read_csv(tmp_path / "t.csv")
        frame["person"] = people
        frame.to_csv(tmp_path / "t.csv", index=False)
    if listed is not None:
        (tmp_path / "elsewhere.txt").write_text(listed)
    with pytest.raises(DataError, match=message):
        node_data.read(section(), tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "numpy", "path": "x.npz"}, "people is for columns"),
        ({"features": ("person", "p0")}, "people.column = 'person' is an input or the label"),
        ({"labels": "person"}, "people.column = 'person' is an input or the label"),
        ({"people": {"column": "person"}}, "elsewhere"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        section(**values)


def test_nobody_changes_sides_after_a_release(tmp_path):
    file = tmp_path / "people.json"
    of = {name: frozenset([pseudonym(name)]) for name in "abc"}
    Counted(of["a"], of["b"]).settle(file, released=False)
    Counted(of["b"], of["a"]).settle(file, released=False)  # nothing has been released
    Counted(of["c"], frozenset()).settle(file, released=True)  # b has left, and a is not here
    for moved in (Counted(of["a"], frozenset()), Counted(frozenset(), of["b"] | of["a"])):
        with pytest.raises(DataError, match="1 people who counted at this node are listed"):
            moved.settle(file, released=True)
    Counted(of["b"] | of["c"], of["a"]).settle(file, released=True)
    file.unlink()
    with pytest.raises(DataError, match="nobody knows whose data this ledger's releases used"):
        Counted(of["b"], of["a"]).settle(file, released=True)


def test_a_person_at_three_nodes_is_in_the_answers_of_one(tmp_path):
    """Nodes for tests: the answers of equal data are equal, bit by bit."""
    answers: dict[tuple[str, bool], np.ndarray] = {}
    for present in (True, False):
        for client, name in enumerate(("a", "b", "c")):
            people = [10 * client + i for i in range(1, 9)] + [7777] * present
            path = tmp_path / f"{name}{present}"
            folder = make(path, people, [7777] * (name != "b"), test_seed=5)
            with served(folder):
                header, body = ask(folder, work=ASKED)
            assert header["ok"], header
            answers[name, present] = numbers(body)
    for name in ("a", "c"):
        assert (answers[name, True] == answers[name, False]).all()
    assert (answers["b", True] != answers["b", False]).any()


def test_a_node_that_states_no_people_refuses_a_run_for_people(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        header, _ = ask(folder, work=ASKED)
        assert header["code"] == "work"
        assert "does not say whose data other nodes use" in header["why"]
        assert ask(folder)[0]["ok"]
    assert len(rows(folder)) == 1


def test_another_list_is_another_release_and_other_work(tmp_path):
    folder = make(tmp_path / "node", [1, 2, 3], [7], approval="operator")
    digests = []
    for listed in ([7], [8, 7], [8, 7]):
        write_list(folder.path / "elsewhere.txt", listed)
        with served(folder):
            digests.append(ask(folder, work=ASKED)[0]["why"])
    assert digests[0] != digests[1] == digests[2]
    edit(folder, 'approval = "operator"', 'approval = "policy"')
    for listed, count in (([7, 8], 1), ([8, 7], 1), ([9, 8, 7], 2)):
        write_list(folder.path / "elsewhere.txt", listed)
        with served(folder):
            assert ask(folder, work=ASKED)[0]["seq"] == count
    assert len({row.data for row in rows(folder)}) == 2
    for listed, people, said in (([1], PEOPLE, "1 people who counted"), ([7], None, "state it")):
        write_list(folder.path / "elsewhere.txt", listed)
        if people is None:
            text = folder.policy_file.read_text().splitlines()
            kept = [line for line in text if not line.startswith("people =")]
            folder.policy_file.write_text("\n".join(kept))
        assert said in refused(folder)


def test_single_examples_are_people_where_each_has_one(tmp_path):
    folder = make(tmp_path / "node", [1, 2, 2, 7, 7], [7], unit="example")
    assert "3 rows of 2 people; with privacy.unit = 'example' each" in refused(folder)
    write_table(tmp_path / "node.csv", [1, 2, 7, 7])
    with served(folder):
        assert ask(folder, work=ASKED)[0]["ok"]


def test_people_cannot_be_stated_after_a_release(tmp_path):
    folder = make(tmp_path / "node", [1, 2, 3], [7])
    policy = folder.policy_file.read_text()
    line = next(line for line in policy.splitlines() if line.startswith("people ="))
    folder.policy_file.write_text(policy.replace(f"{line}\n", ""))
    with served(folder):
        assert ask(folder)[0]["ok"]
    folder.policy_file.write_text(policy)
    assert "nobody knows whose data" in refused(folder)


def test_a_run_for_people_says_so_and_needs_a_cost_that_covers_a_part_of_a_node():
    from fedlgm_nodes.deploy.server_entry import DeployedAssembly, recipe_for_nodes, work_of
    from simulations.config import recipe as recipes

    flag = "deployment.one_node_per_person=true"
    recipe = recipe_for_nodes(recipes.load("nodes", [flag]), 3)
    assert work_of(recipe)["people"] is True
    guarantee = DeployedAssembly(recipe).privacy.first_plan().guarantee
    assert guarantee.status == "conditional"
    assert "each person counting at one node" in guarantee.reason
    central = [flag, "privacy.trust=central", "privacy.max_participations=none"]
    with pytest.raises(ConfigError, match=r"one_node_per_person: .*add-remove.*replace-one"):
        recipe_for_nodes(recipes.load("nodes", central), 3)
    assert "people" not in work_of(recipe_for_nodes(recipes.load("nodes"), 3))
