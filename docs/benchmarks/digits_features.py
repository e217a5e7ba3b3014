"""Train the weights of the metric fd-digits: a small classifier of 8x8 digits, on the training part of the dataset.

    python docs/benchmarks/digits_features.py digits_features.safetensors

The file is part of the package (src/bsi/studies/digits_features.safetensors), so that the distance is the same
everywhere. AdamW on shifted digits, from a fixed seed on one thread.
"""

import sys

import safetensors.torch
import torch
from torch import Tensor, nn

from bsi.data.store import open_dataset
from bsi.studies.measure import digits_classifier
from bsi.values import to_uint8


def fit(steps: int = 3000, batch: int = 128) -> dict[str, Tensor]:
    digits = open_dataset("digits")
    assert digits.bins is not None
    assert digits.labels is not None
    x = torch.from_numpy(to_uint8(digits.bins.values(digits.train), -1.0, 1.0)).float() / 127.5 - 1
    labels = torch.from_numpy(digits.labels.train.copy()).long()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = digits_classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        ids = torch.randint(len(x), (batch,), generator=generator)
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        loss = nn.functional.cross_entropy(network(x[ids].roll(shift, (2, 3))), labels[ids], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: tensor.detach().contiguous() for name, tensor in network.state_dict().items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    safetensors.torch.save_file(fit(), sys.argv[1])
