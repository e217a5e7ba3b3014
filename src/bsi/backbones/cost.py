"""The cost of a network in closed form: parameters, and floating-point operations of a forward pass of one image.

The count includes matrix products, convolutions and attention, with two operations per multiply-add. Norms and
activations are not counted, as is usual. A training step without checkpointing costs three times the forward pass.

    DiT block, T tokens of width W:  2 T W^2 (3 + 1 + 2 mlp_ratio) + 4 T^2 W
    U-Net block, P pixels, k = 3^dim: 2 P k (in W + W^2), and 2 P in W for the shortcut of an up block (in = 2W)
    attention over P pixels:         8 P W^2 + 4 P^2 W; after every block at the coarser resolutions of a U-Net
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from bsi.backbones.config import PRECISION_DIM, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, input_channels


@dataclass(frozen=True)
class Cost:
    """Parameters, and forward FLOPs per image (or other sample)."""

    parameters: int
    flops: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.parameters + other.parameters, self.flops + other.flops)

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.parameters * times, self.flops * times)


def cost(config: BackboneConfig, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0) -> Cost:
    """The cost of `build(config, shape, bins_count, num_classes)`, without building it."""
    config.check(shape)
    channels, space = input_channels(shape[0], bins_count), shape[1:]
    match config:
        case DiTConfig(width=width):
            tokens, pixels = math.prod(config.grid(shape)), config.patch ** len(space)
            block = _total(
                _linear(width, 3 * width, tokens),
                Cost(0, 4 * tokens**2 * width),
                _linear(width, width, tokens),
                _feed_forward(width, config.mlp_ratio, tokens),
            )
            return _total(
                _condition(width, num_classes),
                _linear(width, (6 * config.depth + 2) * width),
                _linear(channels * pixels, width, tokens),
                block * config.depth,
                _linear(width, shape[0] * pixels, tokens),
            )
        case MLPConfig(width=width):
            inputs, outputs = channels * math.prod(space), math.prod(shape)
            return _total(
                _condition(width, num_classes),
                _linear(width, (3 * config.depth + 2) * width),
                _linear(inputs, width),
                _feed_forward(width, config.mlp_ratio) * config.depth,
                _linear(width, outputs),
            )
        case UNetConfig(width=width, levels=levels):
            pixels, kernel = [math.prod(axes) for axes in config.spaces(shape)], 3 ** len(space)
            *_, (deepest, fewest) = sizes = list(zip(config.widths, pixels, strict=True))
            blocks = (
                _residual(w, w, kernel, p) * levels + _residual(2 * w, w, kernel, p) * (levels + 1) for w, p in sizes
            )
            between = (
                _convolution(w, v, kernel, q) + _convolution(v, w, kernel, p) + _attention(v, q) * (2 * levels + 1)
                for (w, p), (v, q) in pairwise(sizes)
            )
            return _total(
                _condition(4 * width, num_classes),
                _linear(4 * width, (2 * levels + 1) * sum(config.widths) + 2 * deepest, bias=False),
                _convolution(channels, width, kernel, pixels[0]),
                *blocks,
                *between,
                _residual(deepest, deepest, kernel, fewest) * 2,
                _attention(deepest, fewest),
                _norm(width),
                _convolution(width, shape[0], kernel, pixels[0]),
            )


def inner_matrices(config: BackboneConfig, shape: tuple[int, ...]) -> Counter[tuple[int, int]]:
    """The number of matrices between hidden features (`Backbone.matrices`) for each shape (rows, columns).

    The filters of a convolution are a matrix (outputs, inputs x window).
    """
    match config:
        case DiTConfig(width=w, depth=depth, mlp_ratio=ratio):
            return Counter(depth * [(3 * w, w), (w, w), (ratio * w, w), (w, ratio * w)])
        case MLPConfig(width=w, depth=depth, mlp_ratio=ratio):
            return Counter(depth * [(ratio * w, w), (w, ratio * w)])
        case UNetConfig(widths=widths, levels=levels):
            k, deepest = 3 ** (len(shape) - 1), widths[-1]
            found = Counter(4 * [(deepest, k * deepest)] + [(3 * deepest, deepest), (deepest, deepest)])
            for w in widths:
                found.update(2 * levels * [(w, k * w)])
                found.update((levels + 1) * [(w, 2 * k * w), (w, k * w), (w, 2 * w)])
            for w, v in pairwise(widths):
                found.update([(v, k * w), (w, k * v)] + (2 * levels + 1) * [(3 * v, v), (v, v)])
            return found


def _total(*parts: Cost) -> Cost:
    return sum(parts, Cost(0, 0))


def _linear(inputs: int, outputs: int, times: int = 1, bias: bool = True) -> Cost:
    return Cost(inputs * outputs + (outputs if bias else 0), 2 * inputs * outputs * times)


def _convolution(inputs: int, outputs: int, kernel: int, pixels: int) -> Cost:
    return Cost(kernel * inputs * outputs + outputs, 2 * kernel * inputs * outputs * pixels)


def _attention(width: int, pixels: int) -> Cost:
    projections = _linear(width, 3 * width, pixels) + _linear(width, width, pixels)
    return _norm(width) + projections + Cost(0, 4 * pixels**2 * width)


def _norm(channels: int) -> Cost:
    return Cost(2 * channels, 0)


def _feed_forward(width: int, ratio: int, times: int = 1) -> Cost:
    return _linear(width, ratio * width, times) + _linear(ratio * width, width, times)


def _condition(width: int, num_classes: int) -> Cost:
    labels = Cost((num_classes + 1) * width if num_classes else 0, 0)
    return _total(_linear(PRECISION_DIM, width), _linear(width, width), labels)


def _residual(inputs: int, width: int, kernel: int, pixels: int) -> Cost:
    shortcut = _linear(inputs, width, pixels) if inputs != width else Cost(0, 0)
    return _total(
        _norm(inputs),
        _convolution(inputs, width, kernel, pixels),
        _norm(width),
        _convolution(width, width, kernel, pixels),
        shortcut,
    )
