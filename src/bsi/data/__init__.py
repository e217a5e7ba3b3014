"""Datasets, prepared once as memory-mapped arrays, and batches of them. Imports no torch.

dataset = open_dataset("digits")                    # .train, .test, .labels, .bins, .shape, .version
"""

from bsi.data.order import SHARDS, check_batch, shards_of
from bsi.data.store import Dataset, Labels, open_dataset
from bsi.io import data_folder
from bsi.values import Bins, to_uint8

__all__ = [
    "SHARDS",
    "Bins",
    "Dataset",
    "Labels",
    "check_batch",
    "data_folder",
    "open_dataset",
    "shards_of",
    "to_uint8",
]
