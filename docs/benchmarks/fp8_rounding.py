"""What each rounding to 8 bits does to training, simulated: float32 products of numbers that 8 bits can hold.

    python docs/benchmarks/fp8_rounding.py --seeds 0 1 2 3                       a few minutes per row on a CPU

A DiT on the digits is trained without rounding and once with each kind of rounding, from the same weights, data and
noise. Formats and scales are those of `bsi.kernels.fused_dit`. The script prints the mean loss of the last fifth of the
steps and the loss of the final weights on fixed batches without rounding, both relative to the run without rounding:
the first includes the rounding noise, the second only what was learned.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import bsi
from bsi.backbones import DiTConfig, build
from bsi.backbones.dit import DiTBlock
from bsi.data import open_dataset

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"qkv": 4.0, "out": 16.0, "expand": 4.0, "contract": 2.0}  # of the activations that these products take


@dataclass(frozen=True)
class Rounding:
    """What is rounded: activations and weights, forward and in the products of the backward; gradients to a format."""

    activations: bool = False
    weights: bool = False
    gradients: torch.dtype | None = None


KINDS = {
    "all": Rounding(True, True, E5M2),
    "all, gradients in e4m3": Rounding(True, True, E4M3),
    "activations": Rounding(activations=True),
    "weights": Rounding(weights=True),
    "gradients": Rounding(gradients=E5M2),
}


def rounded(x: Tensor, dtype: torch.dtype, scale: float | None = None) -> Tensor:
    """With the largest power of two as a scale at which nothing overflows, if none is given."""
    if scale is None:
        largest = x.abs().max().clamp(min=1e-30)
        return rounded(x, dtype, float(torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))))
    return (x * scale).to(dtype).float() / scale


class RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, scale: float, how: Rounding) -> Tensor:
        x = rounded(x, E4M3, scale) if how.activations else x
        weight = rounded(weight, E4M3) if how.weights else weight
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (dy,), kind = ctx.saved_tensors, grads, ctx.how.gradients
        bias = dy.flatten(0, -2).sum(0)
        dy = dy if kind is None else rounded(dy, kind)
        return dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2), bias, None, None


def rounding(layer: nn.Linear, scale: float, how: Rounding) -> Callable[[Tensor], Tensor]:
    return lambda x: RoundedLinear.apply(x, layer.weight, layer.bias, scale, how)


def train(how: Rounding | None, seed: int, steps: int) -> tuple[float, float]:
    """The mean loss of the last fifth, and that of the weights without rounding."""
    torch.manual_seed(seed)
    network = build(DiTConfig(width=64, depth=6, heads=4, patch=2, dropout=0.0), (1, 8, 8), 17)
    model = bsi.Model(network, bsi.BSI(), shape=(1, 8, 8), data=bsi.Bins(-1.0, 1.0, 17))
    layers = [
        (layer, SCALES[name])
        for block in network.modules()
        if isinstance(block, DiTBlock)
        for part in (block.attention, block.mlp)
        for name, layer in part.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if how is not None:
        for layer, scale in layers:
            layer.forward = rounding(layer, scale, how)  # type: ignore[method-assign, assignment]
    data, order = torch.tensor(open_dataset("digits").train), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, 10 * (step + 1) / steps)
        x = data[torch.randint(len(data), (64,), generator=order)]
        torch.manual_seed(1_000_000 + 1000 * seed + step)
        loss = model(x).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    for layer, _ in layers:
        layer.forward = functools.partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    last = losses[-steps // 5 :]
    return sum(last) / len(last), unrounded(model, data)


@torch.no_grad()
def unrounded(model: bsi.Model, data: Tensor) -> float:
    total = 0.0
    for i in range(60):
        torch.manual_seed(7_000_000 + i)
        total += float(model(data[(torch.arange(256) + 256 * i) % len(data)]).mean())
    return total / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    for seed in args.seeds:
        loss, learned = train(None, seed, args.steps)
        print(f"seed {seed}: loss {loss:.4f}", flush=True)
        for kind in args.kinds:
            its_loss, its_learned = train(KINDS[kind], seed, args.steps)
            parts = 100 * (its_loss / loss - 1), 100 * (its_learned / learned - 1)
            print(f"seed {seed}, {kind}: loss {parts[0]:+.2f} %, weights {parts[1]:+.2f} %", flush=True)


if __name__ == "__main__":
    main()
