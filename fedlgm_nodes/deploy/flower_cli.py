"""Flower's own commands for a deployment's SuperLink."""

from __future__ import annotations

import ssl
from typing import Any

from fedlgm.errors import RunError
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.engines.flower_command import CONNECTION, FlwrCommand, environment
from simulations.engines.flower_processes import answers

_REGISTERED = "[code: 23]"  # Flower's ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE


def is_online(node: dict[str, Any]) -> bool:
    """Whether a node counts as connected; a killed one does for `2 * HEARTBEAT_S` after its last
    heartbeat.
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

    def register(self, name: str) -> None:
        """Register a node's public key.

        Raises:
            RunError: the SuperLink refuses the key for another reason than that it is already
                registered.
        """
        public = self._folder.node(name).flower_key
        try:
            self.json(
                "supernode",
                "register",
                str(public.with_name(public.name + ".pub")),
                CONNECTION,
                "--name",
                name,
            )
        except RunError as error:
            if _REGISTERED not in str(error):
                raise

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Flower's statement of each node that registered, by the id of its SuperNode."""
        return {
            str(node["node-id"]): node
            for node in self.json("supernode", "list", CONNECTION)["nodes"]
        }

    def online(self) -> int:
        """Number of nodes that count as connected."""
        return sum(map(is_online, self.nodes().values()))

    def healthy(self) -> bool:
        """Whether the SuperLink answers, under the deployment's certificate.

        Raises:
            RunError: the certificate is not accepted.
        """
        context = ssl.create_default_context(cafile=str(self._folder.server / "ca.crt"))
        return answers(f"https://{self._folder.settings().local}", context)
