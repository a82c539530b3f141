"""The ServerApp that `flwr run` and `flower-simulation` load."""

from fedlgm.importing import importing

with importing():
    from simulations.engines.flower_entry import make_server_app

app = make_server_app()
