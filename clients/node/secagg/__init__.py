"""A node's part in secure aggregation: five steps under its policy, each on disk before its answer leaves."""

from clients.node.policy import Distributed
from clients.node.secagg.participant import Participant, Shared
from clients.node.secagg.store import SessionStore

__all__ = ["Distributed", "Participant", "SessionStore", "Shared"]
