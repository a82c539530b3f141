"""The ServerApp of a deployment."""

from simulations.deploy.server_entry import make_server_app

app = make_server_app()
