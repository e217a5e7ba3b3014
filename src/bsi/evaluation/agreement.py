"""How far the fast form of a network is from float32, eager: output and gradients, on fresh random inputs."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bsi.backbones import build, compute_dtype
from bsi.backbones.acceleration import accelerate
from bsi.evaluation.speed import BINS, Case

__all__ = ["Agreement", "check"]


@dataclass(frozen=True)
class Agreement:
    """Relative distance |fast - reference| / |reference| of outputs and of gradients, and what is tolerated."""

    output: float
    gradient: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.output <= self.tolerance and self.gradient <= self.tolerance


# Eight bits of mantissa, rounded at every operation of a deep network; float32 differs only in the order of its sums;
# fp8 has four bits for weights and activations, three for gradients.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, None: 1e-4}
TOLERANCE_FP8 = 0.2


def check(case: Case, batch: int = 8) -> Agreement:
    """The fast form of a network beside float32, eager: outputs and gradients, dropout included."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))
    with case.device:
        reference = build(case.backbone, case.shape, BINS.count)
    reference = reference.to(case.device).train()
    for parameter in reference.parameters():
        if not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)  # what starts at 0 would hide everything behind it
    fast = copy.deepcopy(reference)
    fast.compute_dtype = compute_dtype(case.precision, case.device)
    accelerate(fast, case.device, case.lean, fp8=case.precision == "fp8")
    x, direction = (torch.randn(batch, *case.shape, device=case.device) for _ in range(2))
    t = torch.rand(batch, device=case.device)

    def run(network: nn.Module) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        output = network(x, t)
        gradients = torch.autograd.grad((output * direction).sum(), list(network.parameters()))
        return output.detach(), torch.cat([g.flatten() for g in gradients])

    (expected, expected_gradient), (found, found_gradient) = run(reference), run(fast)
    return Agreement(
        output=float((found - expected).norm() / expected.norm()),
        gradient=float((found_gradient - expected_gradient).norm() / expected_gradient.norm()),
        tolerance=TOLERANCE_FP8 if case.precision == "fp8" else TOLERANCE[fast.compute_dtype],
    )
