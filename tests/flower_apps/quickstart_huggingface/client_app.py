"""The app's clients."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart_huggingface.task import get_model, load_data, test_fn, train_fn

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    model_name = context.run_config["model-name"]
    trainloader, _ = load_data(partition_id, num_partitions, model_name)
    model = get_model(model_name)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=True)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model.to(device)
    train_fn(model, trainloader, epochs=1, device=device)
    metrics = MetricRecord({"num-examples": len(trainloader)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    partition_id = context.node_config["partition-id"]
    num_partitions = context.node_config["num-partitions"]
    model_name = context.run_config["model-name"]
    _, testloader = load_data(partition_id, num_partitions, model_name)
    model = get_model(model_name)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict(), strict=True)
    loss, accuracy = test_fn(model, testloader, device=torch.device("cpu"))
    metrics = MetricRecord({"num-examples": len(testloader), "loss": loss, "accuracy": accuracy})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
