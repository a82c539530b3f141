"""The app's server."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from advanced_pytorch.strategy import CustomFedAvg
from advanced_pytorch.task import Net, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    num_rounds = context.run_config["num-server-rounds"]
    fraction_train = context.run_config["fraction-train"]
    global_model = Net()
    arrays = ArrayRecord(global_model.state_dict())
    strategy = CustomFedAvg(fraction_train=fraction_train)
    result = strategy.start(
        grid=grid,
        initial_arrays=arrays,
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=num_rounds,
        evaluate_fn=get_global_evaluate_fn(device="cpu"),
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def get_global_evaluate_fn(device: str):
    def global_evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(net, device)
        return MetricRecord({"accuracy": accuracy, "loss": loss})

    return global_evaluate
