"""The ClientApp for nodes without an executor, which forwards to the node's service and imports no
torch.
"""

from fedlgm_nodes.service.relay import make_client_app

app = make_client_app()
