"""Real nodes: each node's release service with its policy and its ledger, the server that asks the
nodes for releases, and commands that deploy nodes and server.
"""
