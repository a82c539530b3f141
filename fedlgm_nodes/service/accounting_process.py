"""The accounting process, which prices releases, and the service's connection to it.

The process holds the accountant and its libraries, which would take more than half of the service's
memory. Without questions it ends after some minutes, like the training process. It is separate from
the training process because other people's models run there. It only reads the ledger, and the
service writes the charges.
"""

from __future__ import annotations

from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from typing_extensions import override

from fedlgm.errors import LedgerError
from fedlgm.importing import importing
from fedlgm_nodes.policy import Policy
from fedlgm_nodes.service import child
from fedlgm_nodes.service.child import END_S, Child, ChildProcess
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.request import Request


def start(link: Connection) -> Child:
    """Start the accounting process with its end of the connection."""
    return child.start("fedlgm_nodes.service.accounting_process", link)


class AccountingProcess(ChildProcess):
    """An `Account` in a process of its own. Costs are JSON (see `fedlgm.privacy.events.encode`).

    Args:
        folder: the node's folder.
        policy: the node's policy.
        ledger: the node's ledger, which the service holds.
    """

    def __init__(self, folder: NodeFolder, policy: Policy, ledger: NodeLedger) -> None:
        super().__init__("accounting process", lambda link: start(link))
        self._folder, self._policy, self._ledger = folder, policy, ledger
        self._spent = -1, 0.0
        self._priced: tuple[Request | None, dict[str, Any]] = None, {}

    def epsilon(self) -> float:
        """`Account.epsilon` of all charges. The process is asked only once after each charge.

        Raises:
            FedlgmError: see `Account`.
        """
        if self._spent[0] != self._ledger.seq:
            self._spent = self._ledger.seq, float(self._ask("epsilon"))
        return self._spent[1]

    def event(self, request: Request) -> dict[str, Any]:
        """`Account.event`."""
        if self._priced[0] is request:  # this saves a question to the process
            return self._priced[1]
        return dict(self._ask("event", request))

    def cost(self, request: Request) -> dict[str, Any]:
        """`Account.cost`."""
        return dict(self._ask("cost", request))

    def price(self, run: str, round: int, request: Request) -> dict[str, Any]:
        """`Account.price`."""
        price, event = self._ask("price", request, run, round)
        self._priced = request, event
        return dict(price)

    def affordable_releases(self, run: str, request: Request, asked: int) -> int:
        """`Account.affordable_releases`."""
        return int(self._ask("affordable_releases", request, run, asked))

    def _ask(self, method: str, request: Request | None = None, *given: Any) -> Any:
        """Call a method of the process, which first checks that it reads the ledger that the
        service holds.
        """
        if request is not None:  # the cost does not depend on the model, which may be large
            request = replace(request, model=np.empty(0, np.float32), text="")
        place = self._ledger.seq, self._ledger.head
        return self._call_twice("answer", method, place, request, *given)[0]["said"]

    @override
    def _start(self) -> None:
        super()._start()
        self._exchange("open", self._folder, self._policy)


class _Answers:
    """The accounting process's side of the connection."""

    def __init__(self) -> None:
        self._account: Any = None
        self._ledger: Any = None
        self.idle = END_S

    def open(self, folder: NodeFolder, policy: Policy) -> Any:
        with importing():
            from fedlgm import privacy
            from fedlgm_nodes.service.account import Account

        np.seterr(all="ignore")
        name = policy.data.name
        self._ledger = NodeLedger(folder.ledger_file, folder.witness_file, name, readonly=True)
        self._account = Account(policy, self._ledger)
        # loads the libraries that a charge needs
        self._account.epsilon(privacy.events.gaussian_event(1.0))
        self.idle = policy.limits.training_idle_seconds
        return {}, b""

    def close(self) -> None:
        """Close this process's connection to the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def answer(
        self, method: str, place: tuple[int, str], request: Request | None, *given: Any
    ) -> Any:
        if (self._ledger.count(), self._ledger.head_at(place[0])) != place:
            raise LedgerError("the ledger's file is not the one that the service holds")
        return {"said": getattr(self, f"_{method}")(request, *given)}, b""

    def _epsilon(self, _: None) -> str:
        return repr(self._account.epsilon())  # JSON has no infinity

    def _event(self, request: Request) -> dict[str, Any]:
        from fedlgm import privacy

        return privacy.events.encode(self._account.event(request))

    def _cost(self, request: Request) -> dict[str, Any]:
        from fedlgm import privacy

        return privacy.events.encode(self._account.cost(request))

    def _price(self, request: Request, run: str, round: int) -> list[dict[str, Any]]:
        from fedlgm import privacy

        price = self._account.price(run, round, request)
        return [privacy.events.encode(price), self._event(request)]

    def _affordable_releases(self, request: Request, run: str, asked: int) -> int:
        return int(self._account.affordable_releases(run, request, asked))


if __name__ == "__main__":
    child.main(_Answers())
