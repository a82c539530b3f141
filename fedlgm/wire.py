"""Names inside the messages between strategy and clients.

A train message carries the global model, the round's plan and a block of clients; its reply carries the sum of the
block's bounded contributions. Nothing else about a client's data leaves it.
"""

from __future__ import annotations

ARRAYS = "arrays"
CONFIG = "config"
METRICS = "metrics"
MODEL = "model"
SUM = "sum"
NORMS = "norms"
NOTE = "note."  # prefix of diagnostics [clients, K] that published variants report

# keys of the config record
ROUND = "round"
BLOCK = "block"
CLIENTS = "clients"
PLAN = "plan"

# record in a node's own state: names of the noise keys of its clients' releases under local trust
RELEASES = "fedlgm.releases"

# keys of the metric record
DISCARDED = "discarded"
EXAMPLES = "num-examples"  # Flower's weight key; here the number of CLIENTS in the block, which is public

# message types: the second is used by published variants that look at private norms
TRAIN_NORMS = "train.norms"

# keys of a node's answer to a query
PARTITION = "partition-id"
PARTITIONS = "num-partitions"
ANY_CLIENT = -1
