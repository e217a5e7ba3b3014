"""What is evaluated: a method and its predictor on a set of samples, of which each rank evaluates a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bsi.data.batches import BatchSource
from bsi.denoiser import Condition
from bsi.errors import UsageError
from bsi.gaussian import squared_norm
from bsi.methods.base import Method, Predictor
from bsi.model import Model
from bsi.runtime.distributed import World
from bsi.values import Bins

__all__ = ["Subject"]


@dataclass(frozen=True)
class Subject:
    """`predict(ids)` is the predictor for those samples (a condition is bound into it), `x(ids)` their values."""

    method: Method
    predict: Callable[[Int[Tensor, " batch"]], Predictor]
    x: Callable[[Int[Tensor, " batch"]], Float[Tensor, "batch *data"]]
    count: int
    shape: tuple[int, ...]
    bins: Bins | None
    device: torch.device
    log_determinant: float = 0.0

    @classmethod
    def plain(
        cls, method: Method, predict: Predictor, x: Float[Tensor, "samples *data"], bins: Bins | None = None
    ) -> Subject:
        """Values in one tensor, and a predictor that needs nothing else."""
        return cls(method, lambda ids: predict, lambda ids: x[ids], len(x), tuple(x.shape[1:]), bins, x.device)

    @classmethod
    def of(cls, model: Model, data: BatchSource, limit: int | None = None, cond: Condition | None = None) -> Subject:
        """A model on the first `limit` samples of the data, or all. The model is to be in evaluation mode."""
        count = len(data) if limit is None else min(limit, len(data))
        if count < 1:
            raise UsageError(f"at least one sample must be evaluated: got {count}")

        def x(ids: Int[Tensor, " batch"]) -> Float[Tensor, "batch *data"]:
            samples = data.take(ids.cpu().numpy())
            model.check(samples)
            return model.values(samples).to(model.device)

        def predict(ids: Int[Tensor, " batch"]) -> Predictor:
            if isinstance(cond, dict):
                return model.denoiser.given({name: value[ids] for name, value in cond.items()})
            return model.denoiser.given(None if cond is None else cond[ids])

        return cls(
            method=model.method,
            predict=predict,
            x=x,
            count=count,
            shape=model.shape,
            bins=model.bins,
            device=model.device,
            log_determinant=0.0 if model.standardize is None else model.standardize.log_determinant,
        )

    def batches(self, count: int, size: int, world: World) -> Iterator[Int[Tensor, " batch"]]:
        """This rank's part of 0 .. count - 1, in batches: neighbors stay together, as they lie on the disk."""
        first, last = world.rank * count // world.size, (world.rank + 1) * count // world.size
        if first < last:  # an empty tensor splits into one empty part
            yield from torch.arange(first, last, device=self.device).split(size)

    def integrand(
        self,
        predict: Predictor,
        x: Float[Tensor, "batch *data"],
        level: Float[Tensor, " batch"],
        eps: Float[Tensor, "batch *data"],
    ) -> Float[Tensor, " batch"]:
        """g = 1/2 level |x - x_hat|^2: one evaluation of the network for each sample, in float64."""
        x_hat = predict(self.method.encoder(level).encode(x, eps), level)
        return 0.5 * level * squared_norm(x - x_hat).double()

    def spread_out(self, count: int) -> Float[Tensor, "batch *data"]:
        """At most `count` samples, evenly spread over the set."""
        count = min(count, self.count)
        return self.x(torch.arange(count, device=self.device) * self.count // count)
