"""Numbers with their standard errors: over seeds, over test images, over samples.

bits per dimension   one network: the Monte Carlo error. Several seeds: the spread over seeds, or that if it is larger.
a difference of two  image by image, since both saw the same images, levels and noise: the error of the mean over
                     images, which has the Monte Carlo error in it, and the spread over seeds
the median image     where a few images make the mean (disentangle.py): half the distance between the order statistics
                     one standard deviation below and above the middle, and the spread over seeds. All seeds saw the
                     same images: what a mean over seeds owes to these is no less than what each does.
Fréchet distance     one network: the error from having drawn these samples. Several seeds: as for bits per dimension.

With two seeds the spread has one degree of freedom: two standard errors are no 95 % interval then.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from bsi.evaluation.points import spread
from bsi.studies.job import Bound, Quality
from bsi.studies.store import Result, Store

__all__ = [
    "Estimate",
    "bits",
    "bits_difference",
    "distance",
    "distance_difference",
    "finite_gap",
    "median_bits",
    "median_bits_difference",
    "over_images",
    "over_seeds",
]


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; 0 where the value is exact."""

    value: float
    error: float

    def __str__(self) -> str:
        """As many digits as the error allows: two of its own."""
        if not self.error > 0 or not math.isfinite(self.error) or not math.isfinite(self.value):
            return f"{self.value:.4g}"
        exponent = math.floor(math.log10(self.error))
        if exponent < -6:  # not to be told from 0 in a row of zeros
            unit = math.floor(math.log10(max(abs(self.value), self.error)))
            scaled = Estimate(self.value / 10.0**unit, self.error / 10.0**unit)
            return f"({scaled})e{unit}" if scaled.error > 1e-6 else f"{self.value:.4g}"
        places = max(0, 1 - exponent)
        return f"{self.value:.{places}f} ± {self.error:.{places}f}"

    def __sub__(self, other: Estimate) -> Estimate:
        """The difference of two independent estimates."""
        return Estimate(self.value - other.value, math.hypot(self.error, other.error))


def over_seeds(each: Sequence[Estimate]) -> Estimate:
    """The mean over seeds, with the spread over seeds or the error of each, whichever is larger."""
    n = len(each)
    own = math.sqrt(sum(e.error**2 for e in each)) / n
    spread_error = statistics.stdev(e.value for e in each) / math.sqrt(n) if n > 1 else 0.0
    return Estimate(statistics.fmean(e.value for e in each), max(own, spread_error))


def bits(store: Store, jobs: Sequence[Bound]) -> Estimate:
    """Bits per dimension of one network for each seed."""
    found = [store.read(job).values for job in jobs]
    return over_seeds([Estimate(v["bits_per_dim"], v["monte_carlo_error"]) for v in found])


def _image_bits(result: Result) -> Float64[np.ndarray, " images"]:
    """The bound of every image in bits per dimension."""
    arrays = result.arrays
    terms = [
        np.average(arrays[term], axis=0, weights=arrays[f"{term}_sizes"]) for term in ("measurement", "reconstruction")
    ]
    return (terms[0] + terms[1] + arrays["prior"]) / (result.values["dimensions"] * math.log(2))


def bits_difference(store: Store, a: Sequence[Bound], b: Sequence[Bound]) -> Estimate:
    """a - b in bits per dimension, paired by image and by seed."""
    each = np.stack([_image_bits(store.read(p)) - _image_bits(store.read(q)) for p, q in zip(a, b, strict=True)])
    images = each.mean(0)
    over_images = float(images.std(ddof=1)) / math.sqrt(len(images))
    seeds = each.mean(1)
    spread_error = float(seeds.std(ddof=1)) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    return Estimate(float(images.mean()), math.hypot(over_images, spread_error))


def median_bits(store: Store, jobs: Sequence[Bound]) -> Estimate:
    """Bits per dimension of the median image, of one network for each seed."""
    return over_images([_median(_image_bits(store.read(job))) for job in jobs])


def median_bits_difference(store: Store, a: Sequence[Bound], b: Sequence[Bound]) -> Estimate:
    """The median image's a - b in bits per dimension, paired by image and by seed."""
    pairs = zip(a, b, strict=True)
    return over_images([_median(_image_bits(store.read(p)) - _image_bits(store.read(q))) for p, q in pairs])


def over_images(each: Sequence[Estimate]) -> Estimate:
    """The mean over seeds of what was found of the same images, whose errors go together; and the spread over seeds."""
    found = over_seeds([Estimate(e.value, 0.0) for e in each])
    return Estimate(found.value, math.hypot(statistics.fmean(e.error for e in each), found.error))


def _median(values: Float64[np.ndarray, " images"]) -> Estimate:
    """How many of n values lie below the true median is Binomial(n, 1/2), its standard deviation sqrt(n) / 2."""
    middle, step = (len(values) - 1) / 2, math.sqrt(len(values)) / 2
    places = np.clip([middle - step, middle + step], 0, len(values) - 1)
    low, high = np.interp(places, np.arange(len(values)), np.sort(values))
    return Estimate(float(np.median(values)), float(high - low) / 2)


def finite_gap(store: Store, finite: Bound, infinite: Bound) -> Estimate:
    """L_M^k - L_M^inf in bits per dimension with the Monte Carlo error of the difference: the noise floor. So too for
    two k."""
    p, q = store.read(finite), store.read(infinite)
    values = torch.from_numpy(p.arrays["measurement"] - q.arrays["measurement"])
    sizes, block = (torch.from_numpy(p.arrays[name]) for name in ("measurement_sizes", "block"))
    found = spread(values, sizes, block)
    unit = len(found.mean) * p.values["dimensions"] * math.log(2)
    return Estimate(float(found.mean.sum()) / unit, math.sqrt(found.sum_variance) / unit)


def distance(store: Store, jobs: Sequence[Quality]) -> Estimate:
    """The Fréchet distance of one network for each seed."""
    found = [store.read(job).values for job in jobs]
    return over_seeds([Estimate(v["distance"], v["error"]) for v in found])


def distance_difference(store: Store, a: Sequence[Quality], b: Sequence[Quality]) -> Estimate:
    """a - b of Fréchet distances, paired by seed."""
    each = [distance(store, [p]) - distance(store, [q]) for p, q in zip(a, b, strict=True)]
    return over_seeds(each)
