"""Noise as a path: one Brownian motion W in the information Lambda for each (seed, sample).

Generation is ds = x_hat dLambda + dW. If each step takes its noise from one and the same W, then more steps of one
seed converge to one image, and two grids or solvers can be compared image by image.

W is a virtual Brownian tree: between two informations a < b where it is known, W at a < m < b is

    W(m) = ((b - m) W(a) + (m - a) W(b)) / (b - a) + sqrt((m - a) (b - m) / (b - a)) eps                   (the bridge)

with an eps that is keyed by the position in the tree. Nodes halve the interval [2^-16, 2^32] in ln Lambda, thirteen
times; inside a leaf, a last bridge with the leaf's own eps gives the value. So W(Lambda) is a sum of 16 Normals with
weights that depend on Lambda alone: nothing is stored, and any path can be evaluated anywhere. Its law is exact on
grids with at most one point in each leaf, whose length in ln Lambda is `RESOLUTION` = 0.004: about 4500 geometric steps
of BSI. Shorter steps raise an error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.errors import UsageError
from bsi.rng import seed_words, weighted_normals

LOW, HIGH = 2.0**-16, 2.0**32
DEPTH = 13
RESOLUTION = math.log(HIGH / LOW) / 2**DEPTH
Weights = dict[int, float]  # of Normals, by key
CACHED = 2**18  # Normals drawn at a time on a CPU: twice as fast, because intermediate results stay in the cache

# Keys of the Normals. Node i of the tree, counted from 1 as in a heap, is 1 + i; the leaves follow.
_FIRST, _LAST, _LEAVES = 0, 1, 1 + 2**DEPTH


@dataclass(frozen=True)
class Expansion:
    """W(Lambda) = sum of weights[i] times the Normal with the key keys[i]. A grid has at most one point in `leaf`."""

    keys: tuple[int, ...]
    weights: tuple[float, ...]
    leaf: int


@functools.lru_cache(maxsize=4096)
def expansion(information: float) -> Expansion:
    """The expansion of W(information), in float64, so that differences of nearby values keep their precision."""
    a, left = LOW, {_FIRST: math.sqrt(LOW)}
    b, right = HIGH, {_FIRST: math.sqrt(LOW), _LAST: math.sqrt(HIGH - LOW)}
    if information <= LOW:
        leaf = _LEAVES + 2**DEPTH
        value = _bridge(0.0, {}, LOW, left, information, leaf)
    elif information >= HIGH:
        leaf = _LEAVES + 2**DEPTH + 1
        value = {**right, leaf: math.sqrt(information - HIGH)}
    else:
        node = 1
        for _ in range(DEPTH):
            middle = math.sqrt(a * b)
            between = _bridge(a, left, b, right, middle, 1 + node)
            if information < middle:
                b, right, node = middle, between, 2 * node
            else:
                a, left, node = middle, between, 2 * node + 1
        leaf = _LEAVES + node - 2**DEPTH
        value = _bridge(a, left, b, right, information, leaf)
    return Expansion(tuple(value), tuple(value.values()), leaf)


def _bridge(a: float, left: Weights, b: float, right: Weights, m: float, key: int) -> Weights:
    """W(m) from W(a), W(b) and the Normal `key`, each as weights of Normals."""
    names = {**left, **right}
    value = {name: ((b - m) * left.get(name, 0.0) + (m - a) * right.get(name, 0.0)) / (b - a) for name in names}
    return {**value, key: math.sqrt((m - a) * (b - m) / (b - a))}


def check_resolved(steps: Iterable[Sequence[float]]) -> None:
    """Raise if both ends of one of these steps lie in the same leaf."""
    for start, end in steps:
        if start > 0 and expansion(start).leaf == expansion(end).leaf:
            raise UsageError(
                f"a Brownian path resolves steps of {RESOLUTION:.2g} in ln Lambda, got one from {start:g} to {end:g}. "
                f"Take fewer steps, or independent noise (--noise independent; SeededNoise)."
            )


@dataclass
class BrownianPath:
    """`Noise` for the given samples of one seed, as increments of their paths."""

    seed: int
    samples: Int[Tensor, " batch"]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    _reached: float = field(default=0.0, init=False, repr=False)
    _value: Tensor | float = field(default=0.0, init=False, repr=False)  # W there, from which the next step starts

    def at(self, information: float) -> Float[Tensor, "batch *data"]:
        """W(information), of variance `information`."""
        terms, device = expansion(information), self.samples.device
        # Asynchronous copies: a synchronization would leave the device idle between two steps.
        places = torch.tensor(terms.keys).to(device, non_blocking=True)
        wide = torch.promote_types(self.dtype, torch.float32)  # float16 cannot represent the ends of the path
        weights = torch.tensor(terms.weights, dtype=wide).to(device, non_blocking=True)
        seed, n = seed_words(self.seed, device), math.prod(self.shape)
        size = len(self.samples) if device.type == "cuda" else max(1, CACHED // (len(terms.keys) * n))
        parts = [weighted_normals(seed, part, places, weights, n) for part in self.samples.split(size)]
        return torch.cat(parts).reshape(-1, *self.shape)

    def __call__(self, start: float, end: float) -> Float[Tensor, "batch *data"]:
        """(W(end) - W(start)) / sqrt(end - start)."""
        if start == end == 0:  # BFN's prior is deterministic
            return torch.zeros(len(self.samples), *self.shape, dtype=self.dtype, device=self.samples.device)
        check_resolved([(start, end)])
        before, after = self._value if start == self._reached else self.at(start), self.at(end)
        self._reached, self._value = end, after
        return ((after - before) / math.sqrt(end - start)).to(self.dtype)
