"""Calls of Flower's command `flwr` for a deployment's SuperLink."""

from __future__ import annotations

import ssl
from typing import Any

from fedlgm.errors import RunError
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.engines.flower_command import CONNECTION, FlwrCommand, environment
from simulations.engines.flower_processes import answers

_REGISTERED = "[code: 23]"  # Flower's ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE


def is_online(node: dict[str, Any]) -> bool:
    """Whether a node counts as connected. A killed node still counts for `2 * HEARTBEAT_S` after
    its last heartbeat.
    """
    return bool(node.get("status") == "online")


class Flower(FlwrCommand):
    """The `flwr` command of a deployment.

    Args:
        folder: the deployment's folder.
    """

    def __init__(self, folder: DeploymentFolder) -> None:
        super().__init__(environment(folder.flower_home))
        self._folder = folder

    def register(self, *names: str) -> None:
        """Register the public keys of nodes.

        Raises:
            RunError: the SuperLink refuses a key for another reason than that the key is registered
                already.
        """
        keys = [self._folder.node(name).flower_key for name in names]
        commands = [
            ("supernode", "register", f"{key}.pub", CONNECTION, "--name", name)
            for key, name in zip(keys, names, strict=True)
        ]
        for name, answer in zip(names, self.json_of_each(commands), strict=True):
            said = str(answer.get("error-message"))
            if answer.get("success") is False and _REGISTERED not in said:
                raise RunError(f"`flwr supernode register` failed for {name}: {said}")

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What Flower reports about each registered node, by the id of the node's SuperNode."""
        return {
            str(node["node-id"]): node
            for node in self.json("supernode", "list", CONNECTION)["nodes"]
        }

    def online(self) -> int:
        """Number of nodes that count as connected."""
        return sum(map(is_online, self.nodes().values()))

    def healthy(self) -> bool:
        """Whether the SuperLink answers and identifies itself with a certificate of the
        deployment's authority.

        Raises:
            RunError: the certificate is not accepted.
        """
        context = ssl.create_default_context(cafile=str(self._folder.server / "ca.crt"))
        return answers(f"https://{self._folder.settings().local}", context)
