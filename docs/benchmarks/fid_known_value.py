"""Reproduce a known value of FID: 10.32333 between 5000 train and 5000 test images of CIFAR-10.

    python docs/benchmarks/fid_known_value.py --device cuda                      all 10,000 images
    python docs/benchmarks/fid_known_value.py --n 100                            a quick check on a CPU

The images are numpy.random.RandomState(2020).choice(count, 5000, replace=False) of each part; the value is the one in
torch-fidelity's own tests. `--n` takes the first n of each; the value then differs.

Measured: 10.323327 on a CPU in float32, at 7 images/s on one core.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bsi.metrics import Inception, collect, frechet_distance
from bsi.progress import Progress

KNOWN = 10.32333
PARTS = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}


def cifar10(folder: Path, part: str, n: int) -> torch.Tensor:
    """The first n of the seeded 5000, uint8 (n, 3, 32, 32). A record is one label and 3072 pixels."""
    records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in PARTS[part]]).reshape(-1, 3073)
    chosen = np.random.RandomState(2020).choice(len(records), 5000, replace=False)[:n]
    return torch.from_numpy(records[chosen, 1:].reshape(-1, 3, 32, 32))


def shown(images: torch.Tensor, batch: int, progress: Progress) -> Iterator[torch.Tensor]:
    for piece in images.split(batch):
        yield piece
        progress.advance(len(piece))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "float16"])
    parser.add_argument("--n", type=int, default=5000, help="images of each part")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--weights", type=Path)
    args = parser.parse_args()
    folder = Path(os.environ.get("BSI_DATA", "~/.cache/bsi-data")).expanduser() / "cifar-10-batches-bin"
    parts = {part: cifar10(folder, part, args.n) for part in PARTS}

    extractor = Inception(args.weights, args.device, args.precision, args.batch)
    extractor(parts["test"][: args.batch])  # the first call chooses kernels and allocates
    total = sum(map(len, parts.values()))
    with Progress("features", total, "image") as progress:
        start = time.perf_counter()
        moments = {
            part: collect(shown(images, args.batch, progress), extractor).moments for part, images in parts.items()
        }
        moments["test"].mean.sum().item()  # waits for the device
        seconds = time.perf_counter() - start
    start = time.perf_counter()
    value = frechet_distance(moments["train"], moments["test"])
    record = {
        "fid": value,
        "known": KNOWN if args.n == 5000 else None,
        "n": args.n,
        "images_per_s": total / seconds,
        "frechet_s": time.perf_counter() - start,
        "device": torch.cuda.get_device_name() if extractor.device.type == "cuda" else "cpu",
        "precision": extractor.precision,
        "batch": args.batch,
        "extractor_hash": extractor.hash,
        "resize": extractor.resize,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
