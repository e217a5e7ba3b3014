"""Datasets, prepared once as memory-mapped arrays, and batches of them. Imports no torch.

dataset = open_dataset("digits")                    # .train, .test, .labels, .bins, .shape, .version
"""

from bsi.data.store import Dataset, Labels, open_dataset
from bsi.io import data_folder
from bsi.values import Bins, to_uint8

__all__ = ["Bins", "Dataset", "Labels", "data_folder", "open_dataset", "to_uint8"]
