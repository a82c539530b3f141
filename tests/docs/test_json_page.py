"""The page of the commands' JSON has every command with `--json`, and the keys that they print."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from simulations.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "api" / "json.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*`) \| (.*) \|$", PAGE, re.MULTILINE)
KEYS = {
    command: set(re.findall(r"`([^`]+)`", keys))
    for commands, keys in ROWS
    for command in re.findall(r"`([^`]+)`", commands)
}
CHECK = "--noise-multiplier 1 --sampler poisson --batch-size 64 --population 60000 --epochs 10"


def commands_with_json(command: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    for name in command.list_commands(click.Context(command)):
        each = command.get_command(click.Context(command), name)
        if hasattr(each, "commands"):
            yield from commands_with_json(each, (*words, name))
        elif any("--json" in option.opts for option in each.params):
            yield " ".join((*words, name))


def test_every_command_with_json_is_listed() -> None:
    listed = set(KEYS) - {"plan --sweep", "ledger FILE"}
    assert listed == set(commands_with_json(typer.main.get_command(app)))


@pytest.mark.parametrize(
    ("command", "arguments", "absent"),
    [
        pytest.param(
            "simulate",
            "digits --rounds 1 --run-dir new",
            {"failures"},
            marks=pytest.mark.slow,
        ),
        ("new", "opacus project", set()),
        pytest.param("plan", "digits", set(), marks=pytest.mark.slow),
        ("calibrate", "--epsilon 3 --delta 1e-5 --steps 100 --sampling-rate 0.1", set()),
        pytest.param("ledger", "{run}", set(), marks=pytest.mark.slow),
        pytest.param("export", "{run}", set(), marks=pytest.mark.slow),
        pytest.param("report", "{run}", set(), marks=pytest.mark.slow),
        pytest.param("doctor", "", set(), marks=pytest.mark.slow),
        pytest.param("partition", "digits", set(), marks=pytest.mark.slow),
        ("check", f"{CHECK} --delta 1e-6 --epsilon 2", set()),
        ("node init", "{short}/node", set()),
    ],
)
def test_the_keys_are_those_that_a_command_prints(
    command: str, arguments: str, absent: set[str], run: Any, finished: Path, short_path: Path
) -> None:
    words = arguments.format(run=finished, short=short_path).split()
    status, out, err = run(*command.split(), *words, "--json")
    assert status == 0, err
    assert KEYS[command] - absent <= set(json.loads(out)) <= KEYS[command] | {"audit"}
