"""The ClientApp that `flwr run` and `flower-simulation` load."""

from fedlgm.importing import importing

with importing():
    from simulations.engines.flower_entry import make_client_app

app = make_client_app()
