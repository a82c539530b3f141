"""What the server does for a release: it charges the ledger, adds the noise and divides by the
public denominator, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedlgm import privacy
from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.kernels import widest
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import Noising, ReleaseObserver, fingerprint
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning import charging
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER, Ledger
from fedlgm.training.devices import Numerics, torch_threads


class ReleaseKeeper(Protocol):
    """Interface of an object that stores the releases of a run, so that others can check them.

    Example:
        >>> class Norms:
        ...     def keep(self, round, plan, noisy, key=None, exact=None):
        ...         print(round, float(noisy.norm()))
        >>> keeper: ReleaseKeeper = Norms()
    """

    def keep(
        self,
        round: int,
        plan: ReleasePlan,
        noisy: Tensor,
        key: str | None = None,
        exact: Tensor | None = None,
    ) -> None:
        """Store a release after it is charged and before it is used.

        Args:
            round: number of the round.
            plan: plan of the release.
            noisy: the released sum, float64 [plan.size].
            key: name of the server's noise, as in the ledger; None if the clients add the noise.
            exact: the bounded sum before the server's noise is added, float64 [plan.size], which
                must stay secret; None if the clients add the noise.
        """


@dataclass(frozen=True)
class Releaser:
    """Charges the ledger for each release, then adds the server's noise.

    Attributes:
        keys: secret key ring of the server's noise.
        ledger: the ledger that is charged before each release.
        numerics: device and noise backend.
        observer: observer of a simulation's releases under central trust; it sees every sum before
            and after the noise is added, and may add canaries to the sum.
        attempt: random identifier of this attempt at the run or at a round. It is set if a later
            attempt cannot repeat the same releases bit by bit, as with real nodes under local
            trust.
        run_noise: noise of the earlier rounds of the run, if the noise is correlated over rounds.
        redrawn: position of the last ledger row for which an earlier process drew the participants,
            with other keys.
        stated: whether the rows of the ledger contain the plan's guarantee, which is needed if
            there is no recipe from which the guarantee follows.
        keeper: stores each release; with None, releases are not stored.

    Example:
        >>> import tempfile
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 10_000}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = ReleasePlan(layers, [1.0], [2.0], facts, Guarantee("proven", "an example"))
        >>> with Ledger(tempfile.mkdtemp() + "/ledger.sqlite", owner="an example") as ledger:
        ...     mean = Releaser(KeyRing.from_seed(1), ledger).mean(BoundedSum.empty(plan), plan, round=1)
        ...     round(float(mean.std()), 2), ledger.rounds()  # sigma / (q N), and the round is charged
        (0.2, 1)
    """

    keys: KeyRing
    ledger: Ledger
    numerics: Numerics = field(default_factory=Numerics)
    attempt: bytes = b""
    observer: ReleaseObserver | None = None
    run_noise: RunNoise = field(default_factory=RunNoise)
    redrawn: int = 0
    stated: bool = False
    keeper: ReleaseKeeper | None = None

    def mean(self, total: BoundedSum, plan: ReleasePlan, round: int) -> Tensor:
        """Charge the round, add the noise and return the released mean [plan.size], float32 on the
        CPU.
        """
        device, backend = self.numerics.device, self.numerics.noise_backend
        values = plan.facts.noised_by.open_sum(total).to(device, widest(device))
        if not plan.facts.noised_by.uploads_released:
            watched = self.observer if plan.size > 0 else None
            if watched is not None:
                watched.insert(round, plan, values)
            noising = Noising.of(values, plan, self.keys, round, SERVER, backend, self.run_noise)
            if self.costs(plan):
                key = noising.name
                self.ledger.charge(
                    self._event(plan, round, key), round=round, key=key, **self._terms(plan)
                )
            exact = values.clone() if self.keeper is not None else values
            with torch_threads(self.numerics.threads):  # a second thread would start too slowly
                noising.add_()
            if self.keeper is not None:
                self.keeper.keep(round, plan, values, noising.name, exact)
            if watched is not None:
                watched.observe(round, plan, values)
        elif self.keeper is not None:
            self.keeper.keep(round, plan, values)
        values.div_(plan.denominator)
        return values.cpu().float()

    def charge_clients(self, plan: ReleasePlan, round: int, clients: Iterable[int]) -> None:
        """Charge clients under local trust before the messages are sent, because a client releases
        as soon as it gets its message.
        """
        if plan.facts.noised_by.uploads_released and self.costs(plan):
            keys = {client: self._client_key(round, client) for client in clients}
            self.ledger.charge_each(plan.event, round=round, keys=keys, **self._terms(plan))

    def _terms(self, plan: ReleasePlan) -> dict[str, Any]:
        """Return the fields of a ledger row other than its cost."""
        return {
            "claim": plan.claim,
            "protects": plan.protects,
            "guarantee": plan.guarantee if self.stated else None,
        }

    @property
    def draws_anew(self) -> bool:
        """Whether the participants of all rounds in the ledger were drawn by earlier processes,
        with other keys.
        """
        return self.redrawn >= self.ledger.position()

    def costs(self, plan: ReleasePlan) -> bool:
        """Whether the round is charged. It is not charged if nothing has been released so far (see
        `ReleasePlan.event`).
        """
        return charging.of(plan.facts).is_charged(plan, self.ledger.rounds)

    def clients_at_cap(self, round: int, max_participations: int | None) -> frozenset[int]:
        """Return the clients that have reached their limit of participations before `round`."""
        if max_participations is None:
            return frozenset()
        counts = self.ledger.participations()
        for later, client, key in self.ledger.since(round):
            # A resumed run repeats this release bit by bit. The release is in the ledger, but it
            # belongs to `round` or a later round.
            counts[client] -= key == self._client_key(later, client)
        return frozenset(client for client, count in counts.items() if count >= max_participations)

    def _event(self, plan: ReleasePlan, round: int, key: str) -> privacy.DpEvent:
        """Return the cost of a release: the cost that the plan states or, if the round was released
        before with other noise, the cost of one more release with the same participants.
        """
        first = next(iter(self.ledger.keys_of(round, after=self.redrawn)), None)
        return plan.event if first in (None, key) else plan.repeated_event

    def _client_key(self, round: int, client: int) -> str:
        keys = self.keys.derive(self.attempt) if self.attempt else self.keys
        return fingerprint(keys, round, client, self.numerics.noise_backend)
