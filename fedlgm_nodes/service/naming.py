"""The names of a node's releases, by which the ledger finds releases that have been charged.

The service names releases itself, because the training process runs other people's models and
losses. If such code could choose a name, it could make a new release under an earlier charge, for
example the charge of a release with more noise.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import fedlgm
from fedlgm_nodes.policy import Policy
from fedlgm_nodes.protocol.messages import canonical, digest, sha256
from fedlgm_nodes.service.request import Request


@dataclass(frozen=True)
class Naming:
    """Gives names to the releases of a node with a given policy, key, data and version of torch.

    Attributes:
        policy: the node's policy.
        secret: the node's noise key.
        data: digest of the node's examples.
        torch: version of torch in the training process.
    """

    policy: Policy
    secret: bytes
    data: str
    torch: str

    def name(self, request: Request, run: str, cohort: str = "") -> str:
        """Name of the release: a keyed digest of everything that determines its numbers.

        The data are included. Otherwise a release after a record was added would have the same
        noise as before, and the difference of the two answers would reveal the record. Under local
        trust the run's label is not included, so the same question costs only once, whichever runs
        ask it. Under central trust every run adds its own noise and invites this node by its own
        schedule, so the label is included, and an answer to another run is another participation.
        In a secure sum the cohort's digest is included, since another attempt is another release
        with other noise.
        """
        return self._digest(request, run, cohort, self.torch, self.policy.limits.threads)

    def lasting_name(self, request: Request, run: str, cohort: str = "") -> str:
        """A name of the release that does not depend on the version of torch and the number of
        threads.

        With the lasting name, the service finds the name under which the release was charged
        before. If the answer of that release may have been sent, the release is not made again,
        because its last bits could differ although the noise is the same.
        """
        return self._digest(request, run, cohort, "lasting")

    def _digest(self, request: Request, run: str, cohort: str, *software: str | int) -> str:
        parts: tuple[str | int, ...] = (
            self.data,
            request.round,
            self.policy.node.client,
            request.text,
            sha256(request.model.data),
        )
        work = request.work.values() | {"exact_sums": request.work.is_exact(self.policy)}
        if not request.plan.facts.noised_by.uploads_released:
            parts += (run,)
        if cohort:
            parts += ("cohort", cohort)
        named = digest("release", *parts, canonical(work), fedlgm.__version__, *software)
        return hmac.new(self.secret, named.encode(), hashlib.sha256).hexdigest()
