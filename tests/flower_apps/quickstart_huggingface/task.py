"""Model, data and training of the app: a small BERT with random weights, reviews of four words."""

import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

SIZES = {"bert-tiny": 16, "bert-mini": 32}


def get_model(model_name):
    width = SIZES[model_name]
    config = BertConfig(
        vocab_size=32,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def load_data(partition_id, num_partitions, model_name):
    generator = torch.Generator().manual_seed(partition_id)
    words = torch.randint(1, 32, (40, 4), generator=generator)
    rows = [
        {"input_ids": one, "attention_mask": torch.ones(4, dtype=torch.int64), "labels": one[0] % 2}
        for one in words
    ]
    return DataLoader(rows[:32], shuffle=True, batch_size=8), DataLoader(rows[32:], batch_size=8)


def train_fn(net, trainloader, epochs, device):
    optimizer = AdamW(net.parameters(), lr=5e-3)
    net.train()
    for _ in range(epochs):
        for batch in trainloader:
            batch = {k: v.to(device) for k, v in batch.items()}
            net(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_fn(net, testloader, device):
    loss, correct, seen = 0.0, 0, 0
    net.eval()
    for batch in testloader:
        batch = {k: v.to(device) for k, v in batch.items()}
        with torch.no_grad():
            outputs = net(**batch)
        loss += outputs.loss.item()
        correct += (outputs.logits.argmax(-1) == batch["labels"]).sum().item()
        seen += len(batch["labels"])
    return loss / seen, correct / seen
