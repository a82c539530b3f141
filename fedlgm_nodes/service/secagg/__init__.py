"""A node's part in secure aggregation: five steps under its policy, each on disk before its answer
leaves.
"""

from fedlgm_nodes.policy import Distributed
from fedlgm_nodes.service.secagg.participant import Participant, Shared
from fedlgm_nodes.service.secagg.store import SessionStore

__all__ = ["Distributed", "Participant", "SessionStore", "Shared"]
