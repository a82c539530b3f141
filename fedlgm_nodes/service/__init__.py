"""A node's release service. Its processes are the only ones that read the node's data.

`listener` receives questions on a Unix domain socket. `service` answers them from the node's data
as far as the policy permits, and charges the ledger. `relay` and `executor` connect Flower with the
socket and have no access to data or keys. The page `docs/how-to/operate-a-node.md` explains who
owns the files, and which threats each process stops.
"""
