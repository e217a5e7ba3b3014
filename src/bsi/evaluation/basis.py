"""What is known of an evaluation without the network: the functions that a control variate is made of.

At each knot,

    steady   of x alone: 1, three traits of x (the mean logarithm of its spectrum, that of its squared differences
             between neighbors, and the logarithm of their mean: rough images are harder than smooth ones, and at some
             levels more than at others), and what each reference expects for x, less its average over the data;
    noisy    of x and eps: how far each reference's error is from its expectation. Their mean over eps is 0.

The references are the linear one of references.py, with the axes of the whole covariance where enough samples tell it,
and for data on a grid two of valuewise.py: with one context and with many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from bsi.evaluation.references import Reference, Wiener
from bsi.evaluation.valuewise import GRID_BINS, Valuewise
from bsi.levels import LogUniform
from bsi.methods.base import Method
from bsi.values import Bins

__all__ = ["Basis", "Flat", "Traits", "knots"]

KNOTS = 33
CONTEXTS = 1, 17  # odd: a sample of middle gray lies within one, not on the edge of two
WHOLE = 4  # samples for each value from which a covariance is learned whole, not as a product over the data's axes
TRAIT_SCALE = 0.25  # traits are given this standard deviation: about what a reference's relative expectation has
SMALLEST = 1 / 256  # of the average: where logarithms of squares end


def knots(levels: LogUniform, count: int = KNOTS) -> Float64[Tensor, " {count}"]:
    """Equally spaced in u = ln(level)."""
    return torch.linspace(math.log(levels.low), math.log(levels.high), count, dtype=torch.float64)


@dataclass(frozen=True)
class Flat:
    """The best linear denoiser of samples as vectors: its axes are those of their whole covariance."""

    wiener: Wiener

    def expected(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots"]:
        return self.wiener.expected(x.flatten(1))

    def deviations(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2"]:
        return self.wiener.deviations(x.flatten(1), eps.flatten(1), left)


@dataclass(frozen=True)
class Traits:
    """A few numbers that say how rough a sample is, with mean 0 and one standard deviation over the data."""

    wiener: Wiener
    difference: float  # mean square difference between neighbors, over the data
    mean: Float64[Tensor, " traits"]
    std: Float64[Tensor, " traits"]

    @classmethod
    def fit(cls, wiener: Wiener, x: Float[Tensor, "batch *data"]) -> Traits:
        steps = _neighbor_steps(x)
        difference = float(steps.mean()) + 1e-30 if steps.numel() else 1.0
        found = _roughness(wiener, difference, x)
        return cls(wiener, difference, found.mean(0), found.std(0, correction=0) + 1e-12)

    def __call__(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch traits"]:
        return TRAIT_SCALE * (_roughness(self.wiener, self.difference, x) - self.mean) / self.std


def _roughness(wiener: Wiener, difference: float, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch traits"]:
    spectrum = wiener.coordinates(x).square() / wiener.variance
    found = [torch.log(spectrum + SMALLEST).mean(1)]
    steps = _neighbor_steps(x) / difference
    if steps.numel():
        found += [torch.log(steps + SMALLEST).mean(1), torch.log(steps.mean(1) + SMALLEST)]
    return torch.stack(found, 1)


def _neighbor_steps(x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch steps"]:
    """Squared differences along every axis but the first, which holds channels, or all there is."""
    along = [torch.diff(x.double(), dim=axis).square().flatten(1) for axis in range(2, x.ndim)]
    return torch.cat([torch.zeros(len(x), 0, dtype=torch.float64, device=x.device), *along], 1)


@dataclass(frozen=True)
class Basis:
    """The references at the knots, their averages over the data, and the traits."""

    knots: Float64[Tensor, " knots"]
    references: tuple[Reference, ...]
    center: Float64[Tensor, "knots references"]
    traits: Traits

    @classmethod
    def fit(cls, method: Method, x: Float[Tensor, "batch *data"], bins: Bins | None) -> Basis:
        """For data like x."""
        at = knots(method.levels).to(x.device)
        levels, enough = torch.exp(at), len(x) >= WHOLE * x[0].numel()
        wiener = Wiener.fit(method, levels, x)
        linear = Flat(Wiener.fit(method, levels, x.flatten(1))) if enough else wiener
        known: tuple[Reference, ...] = (linear,)
        if bins is not None and bins.count <= GRID_BINS:
            known += tuple(Valuewise.fit(wiener, x, bins, count) for count in CONTEXTS)
        center = torch.stack([reference.expected(x).mean(0) for reference in known], 1)
        return cls(at, known, center, Traits.fit(wiener, x))

    @property
    def num_steady(self) -> int:
        return 1 + len(self.traits.mean) + len(self.references)

    @property
    def num_noisy(self) -> int:
        return len(self.references)

    def steady(self, x: Float[Tensor, "batch *data"]) -> Float64[Tensor, "batch knots steady"]:
        expected = torch.stack([reference.expected(x) for reference in self.references], 2)
        traits = self.traits(x)[:, None].expand(-1, len(self.knots), -1)
        return torch.cat([torch.ones_like(expected[..., :1]), traits, expected - self.center], 2)

    def noisy(
        self, x: Float[Tensor, "batch *data"], eps: Float[Tensor, "batch *data"], left: Int[Tensor, " batch"]
    ) -> Float64[Tensor, "batch 2 noisy"]:
        """At the knots left and left + 1."""
        return torch.stack([reference.deviations(x, eps, left) for reference in self.references], 2)
