"""Real nodes: release services with policies and ledgers, the server that asks them, and their
deployment.
"""
