"""The ServerApp of a deployment."""

from fedlgm.importing import importing

with importing():
    from fedlgm_nodes.deploy.server_entry import make_server_app

app = make_server_app()
