"""A strategy that halves the clients' rate, runs its own rounds and keeps the best model and all
metrics."""

import json

import torch
from flwr.serverapp.strategy import FedAvg, Result


class CustomFedAvg(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        if server_round == 2:
            config["lr"] = config["lr"] * 0.5
        return super().configure_train(server_round, arrays, config, grid)

    def start(
        self, grid, initial_arrays, num_rounds=3, timeout=3600, train_config=None, evaluate_fn=None
    ):
        result, best = Result(), 0.0
        arrays, history = initial_arrays, []
        result.evaluate_metrics_serverapp[0] = evaluate_fn(0, initial_arrays)
        for current_round in range(1, num_rounds + 1):
            replies = grid.send_and_receive(
                messages=self.configure_train(current_round, arrays, train_config, grid),
                timeout=timeout,
            )
            arrays, metrics = self.aggregate_train(current_round, replies)
            result.arrays = arrays
            result.train_metrics_clientapp[current_round] = metrics
            found = evaluate_fn(current_round, arrays)
            result.evaluate_metrics_serverapp[current_round] = found
            if found["accuracy"] > best:
                best = found["accuracy"]
                torch.save(arrays.to_torch_state_dict(), "best_model.pt")
            history.append({"round": current_round, "train": dict(metrics), "server": dict(found)})
            with open("results.json", "w", encoding="utf-8") as file:
                json.dump(history, file)
        return result
