"""A node's release service: the only process that reads the node's data, and what it agrees to release.

`listener` takes questions on a Unix domain socket, `service` answers them, by `policy`, over `data`, on account of
`ledger`; `relay` and `executor` stand between Flower and the socket and hold nothing private.
docs/how-to/operate-a-node.md explains who owns which file, docs/node-threats.md what each part stops.
"""
