import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

from clients import PrivateClientApp
from clients.consent import Consent
from fedlgm import Method, RunFacts, Sampling, mechanisms
from strategies import PrivateFedAvg

MECHANISM, RUN = "client-ladp", {"epsilon": 8, "delta": 1e-2, "rounds": 3}
model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10))
facts = RunFacts(0.0, Sampling("poisson", 10, 1.0), "replace-one", "local", **RUN)
agreed = Method.of(model, mechanisms.get(MECHANISM), facts)  # what this client accepts
client = PrivateClientApp(model, mechanism=MECHANISM, consent=Consent(agreed.facts))
server = ServerApp()


@client.train()
def train(message, context):
    mine = slice(context.node_config["partition-id"], None, context.node_config["num-partitions"])
    x, y = (torch.tensor(part[mine]) for part in load_digits(return_X_y=True))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.float() / 16), y).backward()
        optimizer.step()
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)


@server.main()
def main(grid, context):
    ledger = context.run_config["folder"] + "/ledger.sqlite"
    strategy = PrivateFedAvg(
        model, mechanism=MECHANISM, trust="local", clients=10, ledger=ledger, **RUN
    )
    strategy.start(grid)
