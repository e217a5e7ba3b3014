"""A lower bound of a U-Net's training step: its convolutions alone, forward and backward, each shape timed separately.

    python docs/benchmarks/unet_floor.py                                     U-Net 128 x 32 levels, batch 128, on a GPU
    python docs/benchmarks/unet_floor.py --backbone unet-16x2 --batch 2      a quick check on a CPU

Types and memory formats are those of `bsi bench train`. The script prints milliseconds per step for all convolutions
and for the 3x3 ones, the images per second if nothing else took time, and the arithmetic in TFLOP/s. The 1x1
convolutions are shortcuts; they are limited by memory, since they read and write as much as the others.
"""

import argparse
import json
import time
from collections import Counter

import torch
from torch import nn
from torch.nn.functional import conv2d

from bsi.backbones import UNetConfig, build, compute_dtype, resolve

SHAPE = (3, 32, 32)


def milliseconds(
    inputs: int, outputs: int, window: int, batch: int, device: torch.device, dtype: torch.dtype, runs: int
) -> float:
    """The time of one convolution, including its gradients with respect to the image and the weights."""

    def lying(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)

    image, weight = (
        lying(batch, inputs, *SHAPE[1:]).requires_grad_(),
        lying(outputs, inputs, window, window).requires_grad_(),
    )
    gradient = lying(batch, outputs, *SHAPE[1:])

    def run(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            torch.autograd.grad(conv2d(image, weight, padding=window // 2), [image, weight], gradient)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - started) / count

    run(3)
    return run(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backbone", default="unet-128x32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--runs", type=int, default=50)
    args = parser.parse_args()
    config, device = resolve(args.backbone), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(config, UNetConfig) or config.coarser:
        parser.error(f"--backbone is a U-Net at one resolution, e.g. unet-128x32: got {args.backbone}")
    with torch.device("meta"):
        network = build(config, SHAPE, 256)
    dtype = compute_dtype("auto", device) or torch.float32
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    kinds = Counter((conv.in_channels, conv.out_channels, conv.kernel_size[0]) for conv in convolutions)
    each = {kind: kinds[kind] * milliseconds(*kind, args.batch, device, dtype, args.runs) for kind in kinds}
    took, pixels = sum(each.values()), args.batch * SHAPE[1] * SHAPE[2]
    flops = sum(
        6 * window**2 * inputs * outputs * pixels * kinds[inputs, outputs, window] for inputs, outputs, window in kinds
    )
    record = {
        "backbone": args.backbone, "batch": args.batch, "convolutions": kinds.total(), "dtype": str(dtype),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "gflop": round(flops / 1e9, 6), "milliseconds": round(took, 2),
        "of_3x3": round(sum(ms for kind, ms in each.items() if kind[2] == 3), 2),
        "images_per_s": round(1e3 * args.batch / took, 1), "tflops": round(flops / took / 1e9, 3),
    }  # fmt: skip
    print(json.dumps(record))


if __name__ == "__main__":
    main()
