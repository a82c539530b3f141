"""Running Python as another user: only root can, and a virtual environment of root's is closed to
him."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

PACKAGES = os.pathsep.join(
    [str(Path(__file__).parents[2]), *(path for path in sys.path if "site-packages" in path)]
)


def become(user: int, *groups: int) -> list[str]:
    """Beginning of a command that runs as another user, in no group but `groups` and his own."""
    belongs = [f"--groups={','.join(map(str, groups))}"] if groups else ["--clear-groups"]
    return ["setpriv", f"--reuid={user}", f"--regid={user}", *belongs, "--no-new-privs"]


def interpreter(beginning: Sequence[str]) -> str | None:
    """A Python that another user can run with this one's packages; None if there is none."""
    version = tuple(sys.version_info[:2])
    code = (
        f"import sys, flwr, fedlgm_nodes.service.relay; sys.exit(sys.version_info[:2] != {version})"
    )
    for one in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        # By way of a shell: setpriv itself still has root's rights over files while it starts a
        # program.
        command = [*beginning, "sh", "-c", '"$0" -c "$1"', one, code]
        environment = os.environ | {"PYTHONPATH": PACKAGES}
        if (
            subprocess.run(command, env=environment, check=False, capture_output=True).returncode
            == 0
        ):
            return one
    return None


def write_commands(folder: Path, python: str) -> None:
    """`python`, `fedlgm` and Flower's commands in `folder`, run by an interpreter that everybody
    can run."""
    folder.mkdir()
    # Flower's commands are looked for beside the interpreter, where another user's has none.
    ours = (
        "import sys, simulations.engines.flower_command as flower; from simulations.cli import "
        f"main; flower.executable = lambda name: {str(folder)!r} + '/' + name; sys.argv[0] = "
        "'fedlgm'; sys.exit(main())"
    )
    texts = {"python": '"$@"', "fedlgm": f'-c "{ours}" "$@"'}
    for one in entry_points(group="console_scripts"):
        if one.name in (
            "flower-superlink",
            "flower-supernode",
            "flower-superexec",
            "flwr-clientapp",
            "flwr-serverapp",
            "flwr",
        ):
            code = (
                f"import sys; sys.argv[0] = {one.name!r}; from {one.module} import {one.attr}; "
                f"sys.exit({one.attr}())"
            )
            texts[one.name] = f'-c "{code}" "$@"'
    for name, arguments in texts.items():
        (folder / name).write_text(
            f'#!/bin/sh\nexport PYTHONPATH="{PACKAGES}"\nexec "{python}" {arguments}\n'
        )
        (folder / name).chmod(0o755)
