import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from sklearn.datasets import load_digits

from clients import PrivateClientApp
from strategies import PrivateFedAvg

model = torch.nn.Linear(64, 10)
client = PrivateClientApp(model)
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
    arrays, metrics = ArrayRecord(model.state_dict()), MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@server.main()
def main(grid, context):
    ledger = context.run_config["folder"] + "/ledger.sqlite"
    strategy = PrivateFedAvg(model, epsilon=8, delta=1e-2, clients=10, rounds=3, ledger=ledger)
    torch.save(
        strategy.start(grid).arrays.to_torch_state_dict(),
        context.run_config["folder"] + "/model.pt",
    )
