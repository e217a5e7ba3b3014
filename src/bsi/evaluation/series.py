"""Many samples of one network: in memory, or in one file that is made part by part, by any number of ranks.

Sample i depends on (seed, i) alone, so that whoever draws a part draws the same one. Rank r of w takes the parts r,
r + w, r + 2w, ... of those that are missing. What is stored is kept, whatever happens to the process, and the next one
goes on from there.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bsi.errors import NonFinite
from bsi.evaluation.drawing import Drawing, draw
from bsi.evaluation.parts import PART, Parts
from bsi.evaluation.runs import inner_precision, weights_hash
from bsi.model import Model
from bsi.progress import Progress
from bsi.runtime.distributed import World
from bsi.sampling import Step, evaluations

__all__ = ["Series", "Stored", "check_finite"]


@dataclass(frozen=True)
class Series:
    """The samples 0, 1, 2, ... of one network and one way to draw."""

    model: Model
    how: Drawing
    batch_size: int

    @property
    def evaluations(self) -> list[int]:
        """How often a sample's network is evaluated for each step of its trajectory; VDM's last takes none."""
        method, guided = self.model.method, self.how.guidance != 1
        last = evaluations(method, 0, guided)
        return [evaluations(method, 1, guided) - last] * self.how.steps + [last]

    def steps(self, ids: Int[Tensor, " batch"]) -> Iterator[Step]:
        """The trajectories of these samples."""
        return draw(self.model.denoiser, self.model.shape, ids, self.how)

    def first(self, num: int) -> Shaped[np.ndarray, "num ..."]:
        """The first `num` of them."""
        with Progress("sample", num * sum(self.evaluations), "evaluation") as progress:
            return self.rows(range(num), progress)

    def rows(self, ids: range, progress: Progress) -> Shaped[np.ndarray, "rows ..."]:
        """These samples as bin indices or values, computed a batch at a time."""
        rows = []
        for part in torch.arange(ids.start, ids.stop, device=self.model.device).split(self.batch_size):
            x_hat = torch.empty(0)
            for step, count in zip(self.steps(part), self.evaluations, strict=True):
                x_hat = step.x_hat
                progress.advance(count * len(part))
            check_finite(x_hat, part)
            rows.append(self.model.data(x_hat).cpu().numpy())
        return np.concatenate(rows)


@dataclass(frozen=True)
class Stored:
    """The first samples of a series on their way into a file, and those that were not there at the beginning."""

    series: Series
    parts: Parts
    missing: list[range]

    @classmethod
    def of(cls, series: Series, path: Path, num: int) -> Stored:
        """Looks at what is there, and refuses a file or parts of other samples."""
        # The precision that `auto` came to: parts from a GPU and from a CPU are no one set of samples.
        network = {"precision": inner_precision(series.model), "weights": weights_hash(series.model)}
        parts = Parts(path, num, {**asdict(series.how), **network})
        return cls(series, parts, parts.missing())

    @property
    def fresh(self) -> int:
        return sum(map(len, self.missing))

    def drawn(self, world: World) -> Shaped[np.ndarray, "num ..."] | None:
        """Draw what is missing. Every rank calls it, with its share; the first gets the samples, the others None."""
        num, each, mine = self.parts.num, sum(self.series.evaluations), self.missing[world.rank :: world.size]
        done, stream = num - self.fresh, None if world.first else io.StringIO()
        total = done + sum(map(len, mine))
        try:
            with Progress("sample", total * each, "evaluation", done * each, stream) as progress:
                for ids in mine:
                    self.parts.write(ids, self.series.rows(ids, progress))
            world.barrier()
            labels = self.series.how.labels(torch.arange(num))
            return self.parts.join(None if labels is None else labels.numpy()) if world.first else None
        except KeyboardInterrupt:
            kept = num - sum(map(len, self.parts.missing()))
            told = f"{kept} of {num} samples are kept, in parts of {PART}; the same command goes on"
            raise KeyboardInterrupt(told) from None


def check_finite(x_hat: Float[Tensor, "batch *data"], ids: Int[Tensor, " batch"]) -> None:
    if not bool(x_hat.isfinite().all()):
        raise NonFinite(f"samples {int(ids[0])} to {int(ids[-1])} hold NaN or infinity: so do the predictions")
