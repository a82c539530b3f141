"""Flower's own `flwr` command, and the environment in which its processes run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedlgm.errors import RunError

COMPLETED = "finished:completed"
"""Flower's status of a run that has ended without an error."""
CONNECTION = "fedlgm"
"""Name of the SuperLink in Flower's configuration."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TAIL = 15
_LOOK_S = 0.5
_LEVEL = re.compile(r"^(?:[A-Z]+\s*:\s+)?")
_EACH = """
import json, runpy, sys
for sys.argv in json.loads(sys.argv[1]):
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        pass
"""
"""A program that runs several commands of one Python script."""


def environment(home: Path | None) -> dict[str, str]:
    """Environment of Flower's processes whose files are under `home`; None leaves the choice to
    their start scripts.
    """
    local = ("127.0.0.1", "localhost")
    homes = {} if home is None else {"FLWR_HOME": str(home)}
    return (
        {name: value for name, value in os.environ.items() if name != "FLWR_HOME"}
        | homes
        | {
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            # The SuperLink may be on this machine, whatever proxy the rest of the world is behind.
            **{
                name: ",".join(filter(None, (*local, os.environ.get(name, ""))))
                for name in ("NO_PROXY", "no_proxy")
            },
        }
    )


def executable(name: str) -> str:
    """Path of a command that Flower installs beside this interpreter."""
    return str(Path(sys.executable).parent / name)


class FlwrCommand:
    """`flwr ARGUMENTS` in an environment that names the SuperLink.

    Args:
        environment: see `environment`.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self.meanwhile: Callable[[], None] = lambda: None
        """Called repeatedly while a command runs. An error that it raises ends the command."""

    def text(self, *arguments: str) -> str:
        """Output of the command."""
        return self._output([executable("flwr"), *arguments])

    def _output(self, arguments: Sequence[str]) -> str:
        with self._start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        said, problem = command.communicate(timeout=_LOOK_S)
                        return str(said or problem)
                    self.meanwhile()
            except BaseException:
                command.kill()
                raise

    def start_detached(self, *arguments: str) -> None:
        """Start the command, and do not wait for its end."""
        self._start(
            [executable("flwr"), *arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _start(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(arguments, env=self._environment, text=True, **options)

    def json(self, *arguments: str) -> dict[str, Any]:
        """Output of the command with `--format json`.

        Raises:
            RunError: the command failed; the message has the end of its output.
        """
        text = self.text(*arguments, "--format", "json")
        start = text.find("{")
        answer: dict[str, Any] = json.loads(text[start:]) if start >= 0 else {}
        if not answer or answer.get("success") is False:
            name = " ".join(arguments[:2] if arguments[0] == "supernode" else arguments[:1])
            raise RunError(f"`flwr {name}` failed: {answer.get('error-message') or tail(text)}")
        return answer

    def json_of_each(self, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        """Outputs of several commands with `--format json`, also of those that failed. One process
        runs them, since its start takes a second of a core.

        Raises:
            RunError: a command has no such output; the message has the end of what was said.
        """
        calls = [[executable("flwr"), *one, "--format", "json"] for one in commands]
        text = self._output([sys.executable, "-c", _EACH, json.dumps(calls)])
        answers, end = [], 0
        while (start := text.find("{", end)) >= 0:
            answer, end = json.JSONDecoder().raw_decode(text, start)
            answers.append(answer)
        if len(answers) < len(commands):
            raise RunError(f"`flwr {' '.join(commands[len(answers)][:2])}` failed: {tail(text)}")
        return answers

    def submit(self, app: Path, *options: str) -> str:
        """Start a run of the app in a folder, with options of `flwr run`, and return its id.

        Raises:
            RunError: Flower refuses it; the message ends with Flower's reason.
        """
        return str(self.json("run", str(app), CONNECTION, *options)["run-id"])

    def status(self, run_id: str) -> str:
        """Flower's status of a run; a query takes seconds of a core."""
        return str(self.json("list", CONNECTION, "--run-id", run_id)["runs"][0]["status"])

    def log(self, run_id: str) -> str:
        """The run's log."""
        return self.text("log", run_id, CONNECTION, "--show")


def config_file(file: Path, config: Mapping[str, Any]) -> str:
    """Write the configuration of a run to a file, and return the file's name for
    `flwr run --run-config`.

    On a command line Flower accepts no quotes and no emoji, but a path may contain them.
    """
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    return str(file.resolve())


def tail(text: str) -> str:
    """The last lines of a log."""
    return "\n".join(_COLOUR.sub("", text).strip().splitlines()[-_TAIL:])


def reason(log: str) -> str:
    """The reason why a run ended, from its log: the first exception, and the end of the log.

    Flower's last line only says that there was an error.
    """
    first = first_exception(log)
    return f"{first}\nEnd of its log:\n{tail(log)}" if first else f"End of its log:\n{tail(log)}"


def first_exception(log: str) -> str | None:
    """The first exception whose traceback a log holds, with the line that raised it; None if there
    is no exception.

    Python prints a cause before its consequence, and Ray prints an actor's error inside the error
    of the waiting process.
    """
    inside, place = False, ""
    lines = iter(_COLOUR.sub("", log).splitlines())
    for line in lines:
        text = _LEVEL.sub("", line)
        if text.startswith("Traceback (most recent call last)") or "ray::" in text:
            inside, place = True, ""
        elif inside and line.startswith(" "):
            place = line.strip() if line.lstrip().startswith("File ") else place
        elif inside and text.strip():
            said = [text.strip(), *_until_blank(lines)]
            return "\n".join([*said, f"  {place}"] if place else said)
    return None


def _until_blank(lines: Iterator[str], most: int = 4) -> Iterator[str]:
    """The rest of a message of several lines."""
    for line, _ in zip(lines, range(most), strict=False):
        if not line.strip() or _LEVEL.match(line)[0]:  # type: ignore[index]
            return
        yield line.rstrip()
