"""A malicious server with colluders learns no more than one noised sum of each cohort, whatever it
tries."""

from __future__ import annotations

import pytest

from fedlgm_nodes.secagg.cohort import Survivors, Terms, clients_of
from fedlgm_nodes.service.secagg import participant
from tests.support.secagg_attacks import attacked


def test_random_deviations():
    gains, violations, sums = attacked(60, seed=1)
    assert violations == []
    assert gains.deviations >= 60
    assert sums > 0  # it was near enough to the protocol to get anything at all


@pytest.mark.slow
def test_a_thousand_random_deviations():
    gains, violations, sums = attacked(1000, seed=2)
    assert violations == []
    assert gains.accepted > 50
    assert sums > 20


def test_the_search_finds_nodes_that_sign_two_sets(monkeypatch):
    def careless(self, attempt, answered):
        session, cohort = self._session_and_cohort(attempt)
        survivors = Survivors(cohort.digest, tuple(session.sharing), clients_of(answered))
        return survivors.sign(self._signer)

    monkeypatch.setattr(participant.Participant, "agree", careless)
    assert any("two signatures" in one for one in attacked(60, seed=1)[1])


def test_the_search_finds_nodes_that_unmask_directly_and_forget_it(monkeypatch):
    def forgetful(self, attempt, signatures):
        forgets = self._store.signed_survivors(self._session(attempt).cohort) is None
        answer = honest(self, attempt, signatures)
        if forgets:
            self._store.sets.pop(self._session(attempt).cohort)
        return answer

    honest = participant.Participant.unmask
    monkeypatch.setattr(participant.Participant, "unmask", forgetful)
    assert any("two signatures" in one for one in attacked(300, seed=1)[1])


def test_the_search_finds_nodes_that_unmask_for_anybody(monkeypatch):

    def careless(self, attempt, signatures):
        session, _ = self._session_and_cohort(attempt)
        return {int(client): seed for client, (seed, _) in session.held.items()}

    monkeypatch.setattr(participant.Participant, "unmask", careless)
    monkeypatch.setattr(Terms, "problem", lambda self, nodes: "")
    assert any("a sum of too few" in one for one in attacked(80, seed=1)[1])
