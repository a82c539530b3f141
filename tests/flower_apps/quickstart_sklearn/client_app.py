"""The app's clients."""

import warnings

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from quickstart_sklearn.task import (
    UNIQUE_LABELS,
    create_log_reg_and_instantiate_parameters,
    get_model_params,
    load_data,
    set_model_params,
)

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    model = create_log_reg_and_instantiate_parameters()
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())
    x, y, _, _ = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y)
    loss = log_loss(y, model.predict_proba(x), labels=UNIQUE_LABELS)
    metrics = MetricRecord({"num-examples": len(x), "train_logloss": loss})
    arrays = ArrayRecord(get_model_params(model))
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = create_log_reg_and_instantiate_parameters()
    set_model_params(model, msg.content["arrays"].to_numpy_ndarrays())
    _, _, x, y = load_data(
        context.node_config["partition-id"], context.node_config["num-partitions"]
    )
    metrics = MetricRecord({"num-examples": len(x), "accuracy": model.score(x, y)})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
