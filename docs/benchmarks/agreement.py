"""How far the fast form of a network is from float32, on the machine that runs this.

    python docs/benchmarks/agreement.py --backbone dit-l/2
    python docs/benchmarks/agreement.py --backbone unet-128x32 --precision bf16

The fast form (`bsi.backbones.accelerate`) is compared with the same network in float32 without compilation, on random
weights, inputs and directions. Printed are the relative distances |fast - reference| / |reference| of outputs and of
gradients. The exit code is 1 if one exceeds its tolerance.
"""

import argparse
import copy
import os
import sys

import torch
from torch import Tensor, nn

from bsi.backbones import accelerate, build, compute_dtype, resolve

# Rounding at every operation of a deep network; float32 differs only in the order of its sums. fp8 has four bits for
# weights and activations, and three for gradients.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, None: 1e-4}
TOLERANCE_FP8 = 0.2


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="dit-l/2")
    parser.add_argument("--size", type=int, default=32, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)
    device, shape = torch.device(args.device), (3, args.size, args.size)
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    with device:
        reference = build(resolve(args.backbone), shape, 256).train()
    for parameter in reference.parameters():
        if not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)  # a layer of zeros would hide the layers before it
    fast = copy.deepcopy(reference)
    fast.compute_dtype = compute_dtype(args.precision, device)
    accelerate(fast, device, args.lean, fp8=args.precision == "fp8")
    x, direction = (torch.randn(args.batch, *shape, device=device) for _ in range(2))
    t = torch.rand(args.batch, device=device)

    def run(network: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        output = network(x, t)
        gradients = torch.autograd.grad((output * direction).sum(), list(network.parameters()))
        return output.detach(), torch.cat([g.flatten() for g in gradients])

    output, gradient = (
        float((found - expected).norm() / expected.norm())
        for expected, found in zip(run(reference), run(fast), strict=True)
    )
    tolerance = TOLERANCE_FP8 if args.precision == "fp8" else TOLERANCE[fast.compute_dtype]
    holds = output <= tolerance and gradient <= tolerance
    print(f"output {output:.1e}, gradient {gradient:.1e}, tolerance {tolerance:.0e}: {'holds' if holds else 'BROKEN'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
