"""CIFAR-10's images from the binary version in the data folder, for the scripts next to this file."""

import numpy as np
import torch
from torch import Tensor

from bsi.io import data_folder


def cifar10(part: str) -> Tensor:
    """uint8 (n, 3, 32, 32) of "train" or "test"."""
    return torch.from_numpy(_records(part)[:, 1:].reshape(-1, 3, 32, 32))


def cifar10_labels(part: str) -> np.ndarray:
    """The classes, 0 to 9, of the same images."""
    return _records(part)[:, 0].astype(np.int64)


def _records(part: str) -> np.ndarray:
    """A record is one label and 3072 pixels."""
    names = ["test_batch.bin"] if part == "test" else [f"data_batch_{i}.bin" for i in range(1, 6)]
    folder = data_folder() / "cifar-10-batches-bin"
    return np.concatenate([np.fromfile(folder / name, np.uint8) for name in names]).reshape(-1, 3073)
