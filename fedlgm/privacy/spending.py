"""The spending of a ledger's participants: charged events with counts, which are composed to
epsilon.

Events are the ledger's JSON text, so that equal events are counted before composition.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fedlgm import privacy

_Counts = Counter[str]  # number of charges by event
_Profile = frozenset[tuple[str, int]]


@dataclass(frozen=True)
class Spending:
    """Numbers of charges by event and participant.

    Attributes:
        shared: by event, the number of the server's releases, which are charged to every
            participant.
        own: by client and event, the number of the client's own releases, under local trust.

    Example:
        >>> from fedlgm.privacy.events import encode, gaussian_event
        >>> text = json.dumps(encode(gaussian_event(2.0)))
        >>> round(Spending(Counter([text]), {}).epsilon(1e-5, "pld"), 3)
        1.993
    """

    shared: _Counts
    own: dict[int, _Counts]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, str, int]], server: int) -> Spending:
        """Spending from rows (participant, event, count), with one row for each event of a
        participant or of `server`.
        """
        by_client: defaultdict[int, _Counts] = defaultdict(Counter)
        for client, event, count in rows:
            by_client[client][event] = count
        return cls(by_client.pop(server, Counter()), by_client)

    def epsilon(self, delta: float, accountant: str) -> float:
        """Largest proven epsilon at `delta` of any participant."""
        return max(_profile_epsilon(profile, delta, accountant) for profile in self._worst())

    def worst(self) -> list[list[tuple[privacy.DpEvent, int]]]:
        """Events with counts of each participant whose events are not part of another participant's
        events.
        """
        return [_decode(profile) for profile in self._worst()]

    def _worst(self) -> list[_Profile]:
        profiles = set(self._profiles().values()) or {frozenset(self.shared.items())}
        return _maximal_profiles(profiles)

    def client_epsilons(self, delta: float, accountant: str) -> dict[int, float]:
        """Proven epsilon at `delta` of each client that has made releases itself."""
        spent = self._profiles()
        epsilons = {
            profile: _profile_epsilon(profile, delta, accountant) for profile in set(spent.values())
        }
        return {client: epsilons[profile] for client, profile in sorted(spent.items())}

    def _profiles(self) -> dict[int, _Profile]:
        """Each client's spending, including the server's releases."""
        return {
            client: frozenset((self.shared + events).items()) for client, events in self.own.items()
        }


def claimed_epsilon(
    rows: Iterable[tuple[int, str, str, int]], delta: float, accountant: str
) -> float:
    """Largest epsilon of a participant as the methods' authors would state it; see
    `Ledger.claimed_epsilon`.

    Args:
        rows: tuples (participant, event, claim, count).
        delta: delta at which claimed events are composed.
        accountant: accountant that composes them.
    """
    naive: defaultdict[int, float] = defaultdict(float)
    events: defaultdict[int, _Counts] = defaultdict(Counter)
    for client, event, claim_text, count in rows:
        claim = json.loads(claim_text)
        if "epsilon" in claim:
            naive[client] += count * float(claim["epsilon"])
        else:
            events[client][json.dumps(claim["event"]) if "event" in claim else event] += count
    profiles = {client: frozenset(counts.items()) for client, counts in events.items()}
    composed = {
        profile: _profile_epsilon(profile, delta, accountant) for profile in set(profiles.values())
    }
    for client, profile in profiles.items():
        naive[client] += composed[profile]
    return max(naive.values(), default=0.0)


def _decode(profile: _Profile) -> list[tuple[privacy.DpEvent, int]]:
    return [(privacy.events.decode(json.loads(event)), count) for event, count in sorted(profile)]


def _profile_epsilon(profile: _Profile, delta: float, accountant: str) -> float:
    return privacy.accounting.composed_epsilon(_decode(profile), delta, accountant)


def _maximal_profiles(profiles: set[_Profile]) -> list[_Profile]:
    """The profiles that are not contained in another profile. Only these can have the largest
    epsilon.
    """
    counts = {profile: Counter(dict(profile)) for profile in profiles}
    return [
        profile
        for profile, counter in counts.items()
        if not any(counter < other for other in counts.values())
    ]
