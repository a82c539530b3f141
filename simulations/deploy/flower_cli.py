"""Flower's own commands against a deployment's SuperLink."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from fedlgm.errors import RunError
from simulations.deploy.layout import CONNECTION, DeploymentFolder


def environment(home: Path | None) -> dict[str, str]:
    """Environment of Flower's processes whose files are under `home`; None leaves that to their start scripts."""
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
            "NO_PROXY": ",".join(filter(None, (*local, os.environ.get("NO_PROXY", "")))),
            "no_proxy": ",".join(filter(None, (*local, os.environ.get("no_proxy", "")))),
        }
    )


class Flower:
    """The `flwr` command of a deployment.

    Args:
        folder: the deployment's folder.
    """

    def __init__(self, folder: DeploymentFolder) -> None:
        self._folder, self._environment = folder, environment(folder.flower_home)

    def text(self, *arguments: str) -> str:
        """Output of `flwr ARGUMENTS`."""
        command = [str(Path(sys.executable).parent / "flwr"), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        return done.stdout or done.stderr

    def json(self, *arguments: str) -> dict[str, Any]:
        """Answer of `flwr ARGUMENTS --format json`.

        Raises:
            RunError: it failed; with what it said.
        """
        text = self.text(*arguments, "--format", "json")
        start = text.find("{")
        answer: dict[str, Any] = json.loads(text[start:]) if start >= 0 else {}
        if not answer or answer.get("success") is False:
            raise RunError(f"`flwr {' '.join(arguments[:2])}` failed: {answer.get('error-message') or text.strip()}")
        return answer

    def register(self, name: str) -> None:
        """Register a node's public key.

        Raises:
            RunError: the SuperLink refuses it for another reason than that it knows it.
        """
        public = self._folder.node(name).flower_key
        try:
            self.json("supernode", "register", str(public.with_name(public.name + ".pub")), CONNECTION, "--name", name)
        except RunError as error:
            if "already in use" not in str(error):
                raise

    def online(self) -> int:
        """Number of nodes that are connected."""
        return sum(node.get("status") == "online" for node in self.json("supernode", "list", CONNECTION)["nodes"])

    def healthy(self) -> bool:
        """Whether the SuperLink answers, under the deployment's certificate."""
        settings = self._folder.settings()
        context = ssl.create_default_context(cafile=str(self._folder.server / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        try:
            with opener.open(f"https://{settings.host}:{settings.port}/health", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False
