"""The app's clients, each of which keeps a classification head of its own in its state."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from advanced_pytorch.task import Net, load_data
from advanced_pytorch.task import train as train_fn

app = ClientApp()
HEAD = "classification-head"


@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    if HEAD in context.state:
        model.fc2.load_state_dict(context.state[HEAD].to_torch_state_dict())
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    trainloader = load_data(partition_id, num_partitions)
    epochs = context.run_config["local-epochs"]
    train_loss = train_fn(
        model, trainloader, epochs, msg.content["config"]["lr"], torch.device("cpu")
    )
    context.state[HEAD] = ArrayRecord(model.fc2.state_dict())
    arrays = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"train_loss": train_loss, "num-examples": len(trainloader.dataset)})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)
