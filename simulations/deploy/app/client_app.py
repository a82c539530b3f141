"""The ClientApp for nodes without an executor, which forwards to the node's service and imports no torch."""

from clients.node.relay import make_client_app

app = make_client_app()
