"""The five steps of a secure sum, as the node's service answers them with its ledger and the peers
in its policy.

If an older copy of the session store is restored without the ledger, no further secret is revealed.
The ledger holds the cohort of each advert's keys, the signed sets of survivors and the digest of
every vector that may have been sent, and its witness shows whether the ledger itself was restored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import ConfigError
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.secagg.cohort import MOST_NODES, Terms
from fedlgm_nodes.secagg.steps import texts
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.secagg.participant import Participant
from fedlgm_nodes.service.secagg.store import SessionStore


class SecureSteps:
    """Answers the steps of secure sums for one node.

    Args:
        policy: the node's policy, with its peers.
        signer: Ed25519 key of the node's service.
        ledger: ledger of the node.
        file: SQLite file of the node's sessions.

    Raises:
        ConfigError: the policy does not list this node among its peers.
        LedgerError: the file cannot be used.
    """

    def __init__(
        self, policy: Policy, signer: Ed25519PrivateKey, ledger: NodeLedger, file: Path
    ) -> None:
        if policy.distributed is None:
            raise ConfigError(
                "a policy without a section [distributed] takes part in no secure sum"
            )
        self._store = SessionStore(file, ledger)
        try:
            self._participant = Participant(
                policy.node.client, signer, policy.distributed, self._store
            )
        except Refusal as refusal:
            self._store.close()
            raise ConfigError(f"the policy's {refusal.why}") from refusal

    def answer(self, step: str, terms: Terms, given: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a step that reads none of the node's data.

        Args:
            step: "advertise", "share", "agree" or "unmask".
            terms: terms of the attempt, as they follow from the question.
            given: the values that the server gives for the step, which are untrusted.

        Raises:
            Refusal: the step is not allowed, or malformed.
        """
        node, attempt = self._participant, terms.digest
        if step == "advertise":
            return node.advertise(terms).values()
        if step == "share":
            adverts = given.get("adverts")
            if not isinstance(adverts, list) or len(adverts) > MOST_NODES:
                raise Refusal("malformed", f"adverts must be a list of at most {MOST_NODES}")
            shared = node.share(attempt, adverts)
            return {"sealed": texts(shared.sealed), "commitment": shared.commitment}
        if step == "agree":
            return {"signature": node.agree(attempt, given.get("answered"))}
        return {"shares": texts(node.unmask(attempt, _by_client(given.get("signatures"))))}

    def mask(
        self,
        terms: Terms,
        given: Mapping[str, Any],
        charge: Callable[[str], None],
        make: Callable[[str], np.ndarray],
    ) -> np.ndarray:
        """Answer the step "mask" with the masked vector, uint32 [size]. The arguments `charge` and
        `make` are those of `Participant.mask`.

        Raises:
            Refusal: the step is not allowed, or malformed.
        """
        sealed = _by_client(given.get("sealed"))
        return self._participant.mask(terms.digest, sealed, charge, make, given.get("sharing"))

    def sent(self, terms: Terms) -> str:
        """Signature of the statement that the vector was sent (see `Participant.sent`)."""
        return self._participant.sent(terms.digest)

    def cohort(self, terms: Terms) -> str:
        """Digest of the cohort with which this node has shared its secrets; empty if it has shared
        none.
        """
        session = self._store.session(terms.digest)
        return "" if session is None else session.cohort

    def close(self) -> None:
        """Close the session store."""
        self._store.close()


def _by_client(raw: Any) -> dict[int, str]:
    """Convert the keys of a JSON object of texts to client numbers.

    Raises:
        Refusal: the value is not an object of texts by client number.
    """
    if not isinstance(raw, dict) or len(raw) > MOST_NODES:
        raise Refusal(
            "malformed", f"a step's texts must be an object with at most {MOST_NODES} clients"
        )
    entries = {
        int(client): text for client, text in raw.items() if client.isdecimal() and len(client) < 11
    }
    if len(entries) < len(raw) or not all(isinstance(text, str) for text in entries.values()):
        raise Refusal("malformed", "a step's texts must be given by client number, each once")
    return entries
