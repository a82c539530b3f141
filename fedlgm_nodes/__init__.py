"""Federations of real nodes: the release service of each node with its policy and ledger, the
server that asks the nodes for releases, and the commands that deploy both.
"""
