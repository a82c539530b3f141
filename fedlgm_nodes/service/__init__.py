"""A node's release service, the only process that reads the node's data, with its policy and
ledger.

`listener` takes questions on a Unix domain socket, and `service` answers them from `data`, within
`policy`, and charges `ledger`. `relay` and `executor` connect Flower with the socket and hold
nothing private. docs/how-to/operate-a-node.md explains the owners of the files and the threats that
each part stops.
"""
