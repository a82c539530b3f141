"""The node's side of secure aggregation, which takes five steps under the node's policy. The state
that an answer depends on is on disk before the answer is sent.
"""

from fedlgm_nodes.policy import Distributed
from fedlgm_nodes.service.secagg.participant import Participant, Shared
from fedlgm_nodes.service.secagg.store import SessionStore

__all__ = ["Distributed", "Participant", "SessionStore", "Shared"]
