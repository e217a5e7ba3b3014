"""`Generation`: what a model draws: samples, and samples given a measurement: with noise, of a part, or a linear map.

`bsi.Model` is a `Generation` with data, a loss and a bound. Each method draws the noise that the functions of
`bsi.sampling`, `bsi.conditioning` and `bsi.flow` take as an argument, calls them batch by batch, and converts between
values and the units of the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from bsi.checks import as_tensor
from bsi.conditioning import denoising, inpainted, measured
from bsi.denoiser import Condition, Denoiser, check_condition, check_labels
from bsi.errors import NonFinite, UsageError
from bsi.flow import arc, flow_decode, flow_encode
from bsi.methods.base import Method, Predictor
from bsi.progress import Shown, shown
from bsi.rng import Noise
from bsi.sampler import NOISY_SOLVER, Sampler
from bsi.sampling import Step, drawing, levels_of, noise_of, trajectory
from bsi.symbols import known_symbols
from bsi.values import Bins, DataKind, Standardize, Symbols
from bsi.variance import Variance


class Generation(nn.Module):
    """Draw samples of a denoiser and a method, unconditionally or given labels and measurements."""

    method: Method
    denoiser: Denoiser
    shape: tuple[int, ...]
    kind: DataKind
    latent_shape: tuple[int, ...]
    variances: dict[str, Variance]

    def variance(self, kind: str) -> Variance:
        """The predictive variance of this kind, which `fit_variance` fitted."""
        if kind not in self.variances:
            raise UsageError(
                f"the variance {kind!r} has not been fitted. Call model.fit_variance(training_samples, {kind!r}) first."
            )
        return self.variances[kind]

    @property
    def bins(self) -> Bins | None:
        """The bins of binned data, else None."""
        return self.kind if isinstance(self.kind, Bins) else None

    @property
    def symbols(self) -> Symbols | None:
        """The symbols of discrete data, else None."""
        return self.kind if isinstance(self.kind, Symbols) else None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computations outside the network: float64 after `model.double()`, else float32."""
        wide = any(p.dtype == torch.float64 for p in self.parameters())
        return torch.float64 if wide else torch.float32

    @property
    def classes(self) -> int | None:
        """The number of labels of the network; None if it has no attribute `num_classes`."""
        return getattr(self.denoiser.backbone, "num_classes", None)

    def values(self, data: Tensor | np.ndarray) -> Float[Tensor, "batch *data"]:
        """Convert data to the values that the method works with, of shape `latent_shape`.

        They are bin centers, embedded symbols or standardized continuous data.
        """
        data = as_tensor(data)
        if data.shape[1:] != self.shape:
            raise UsageError(
                f"data must have the shape (batch, {', '.join(map(str, self.shape))}), got {tuple(data.shape)}"
            )
        if not data.is_floating_point():
            return self.kind.values(data, self.dtype)
        x = self.kind.values(data, torch.promote_types(data.dtype, self.dtype))
        return x.to(self.dtype) if any(p.is_floating_point() for p in self.parameters()) else x

    def data(self, x: Float[Tensor, "batch *data"]) -> Tensor:
        """Convert values back to data: the nearest bin or symbol, or the original units of continuous data."""
        return self.kind.data(x).reshape(len(x), *self.shape)

    def labels(self, ids: range, label: int | Sequence[int] | None) -> Int[Tensor, " batch"] | None:
        """The label of each of these samples: one for all, or sample i's from the sequence in turn."""
        if label is None:
            return None
        if self.classes == 0:
            raise UsageError(f"this network was trained without labels, got label={label}. Train it with labels.")
        known = torch.as_tensor([label] if isinstance(label, int) else list(label))
        return known[torch.arange(ids.start, ids.stop, ids.step) % len(known)]

    def sample(
        self,
        num: int | range,
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw samples: bin indices (uint8 for 8-bit images), symbols, or values. Sample i depends on (seed, i) alone.

        Args:
            num: How many samples, or a range of their numbers i.
            sampler: How to draw them; `changes` are fields of it: `model.sample(16, steps=32, guidance=2.0)`.
            seed: `bsi sample` with the same seed draws the same samples.
            label: The class of all samples, or a sequence of classes that sample i takes in turn: `range(10)`.
            cond: A condition with one row for each sample, in place of `label`.
            batch_size: Samples that are drawn together.
            progress: Show progress on stderr, or a function that is called with the number of samples after each step.

        Raises:
            NonFinite: If a sample holds NaN or infinity.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> model.sample(4, steps=8, seed=1).shape
            torch.Size([4, 1, 8, 8])
        """
        ids, sampler = self._ids(num, batch_size), replace(sampler or Sampler(), **changes)
        cond = self._condition(ids, label, cond)

        def begin(rows: Integer[Tensor, " batch"], batch: range) -> Iterator[Step]:
            return self.trajectory(batch, sampler, seed=seed, cond=rows_of(cond, rows, self.device))

        return self._drawn(begin, ids, sampler.steps, batch_size, progress)

    def trajectory(
        self,
        num: int | range,
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        **changes: Any,
    ) -> Iterator[Step]:
        """Iterate over the steps of drawing samples, as values; the x_hat of the last step is the sample.

        The arguments are those of `sample`; all samples are drawn together.

        Raises:
            UsageError: Before the first evaluation, if the sampler does not suit the method.
            NonFinite: After the last step, if a sample holds NaN or infinity.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> for step in model.trajectory(2, steps=3):
            ...     print(f"{float(step.level):.3g}", tuple(step.x_hat.shape))
            0.01 (2, 1, 8, 8)
            0.0231 (2, 1, 8, 8)
            1.58 (2, 1, 8, 8)
            1e+04 (2, 1, 8, 8)
        """
        ids, sampler = self._ids(num), replace(sampler or Sampler(), **changes)
        predict = self.denoiser.given(self._condition(ids, label, cond), sampler.guidance)
        variance = None if sampler.variance == "none" else self.variance(sampler.variance)
        numbers, shape = self._numbers(ids), self.latent_shape
        return self._evaluated(drawing(self.method, predict, sampler, numbers, shape, seed, self.dtype, variance))

    def denoise(
        self,
        y: Tensor | np.ndarray,
        precision: float,
        *,
        steps: int = Sampler.steps,
        solver: str = NOISY_SOLVER,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        guidance: float = 1.0,
        batch_size: int = 256,
        progress: Shown = False,
    ) -> Tensor:
        """Draw a sample from p(x | y) for each measurement y = x + noise of variance 1 / precision.

        This is exact up to the network's errors: see `bsi.conditioning`. For several draws given one measurement,
        repeat it: `y.expand(8, *model.shape)`.

        Args:
            y: Floats in the units of the data; for binned data its values, e.g. in [-1, 1].
            precision: 1 / (standard deviation of the noise)^2, in the same units.
            steps: Steps from the measurement to the sample.
            solver: One that adds the noise of measurements: posterior or sde2.
            guidance: See `Sampler`. The other arguments are those of `sample`.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:2])
            >>> y = model.values(images) + 0.4 * torch.randn(2, 1, 8, 8)
            >>> model.denoise(y, precision=1 / 0.4**2).shape
            torch.Size([2, 1, 8, 8])
        """
        std = self.kind.std if isinstance(self.kind, Standardize) else 1.0
        if isinstance(std, tuple):
            raise UsageError(
                "this data is standardized with another std for each element or channel, so that the noise of one "
                "precision becomes noise of several. Use model.restore(y, lambda x: x, precision)."
            )
        y = self._measurement(y)

        def begin(predict: Predictor, noise: Noise, rows: Integer[Tensor, " batch"]) -> Iterator[Step]:
            return denoising(self.method, predict, noise, y[rows], precision * std**2, steps, solver)

        sampler = Sampler(steps, solver, guidance=guidance)
        return self._restored(begin, len(y), sampler, seed, label, cond, batch_size, progress)

    def inpaint(
        self,
        x: Tensor | np.ndarray,
        mask: Tensor | np.ndarray,
        sampler: Sampler | None = None,
        *,
        precision: float = math.inf,
        iterations: int = 5,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw the unknown part of each sample, given the part that is known.

        Args:
            x: Data. What it has where the mask is 0 is ignored.
            mask: 1 or True where x is known; one for all samples, or one for each.
            sampler: How to draw, by default with 15 steps of sde2; `changes` are fields of it.
            precision: By default x is known exactly; a finite number is that of measurements with noise.
            iterations: Backward passes for each prediction. The other arguments are those of `sample`.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:2])
            >>> mask = torch.ones(1, 8, 8)
            >>> mask[:, 4:] = 0  # the lower half is unknown
            >>> filled = model.inpaint(images, mask, steps=8)
            >>> bool((filled == images)[..., :4, :].all())
            True
        """
        y, known = self.values(x).to(self.device), as_tensor(mask).to(self.device)
        if known.shape not in (self.shape, (len(y), *self.shape)):
            raise UsageError(f"a mask has the shape of one sample or of all, got {tuple(known.shape)} for {self.shape}")
        sampler = replace(sampler or Sampler(solver=NOISY_SOLVER), **changes)
        if self.symbols is not None:
            return self._inpainted_symbols(y, known, sampler, precision, seed, label, cond, batch_size, progress)
        known = known.expand_as(y)

        def conditioned(predict: Predictor, rows: Integer[Tensor, " batch"]) -> Predictor:
            return inpainted(self.method, predict, y[rows], known[rows], precision, iterations)

        drawn = self._restored(
            self._given_measurement(conditioned, sampler), len(y), sampler, seed, label, cond, batch_size, progress
        )
        return torch.where(known.bool(), self.data(y), drawn) if precision == math.inf else drawn

    def _inpainted_symbols(
        self,
        y: Float[Tensor, "batch *latent"],
        mask: Tensor,
        sampler: Sampler,
        precision: float,
        seed: int,
        label: int | Sequence[int] | None,
        cond: Condition | None,
        batch_size: int,
        progress: Shown,
    ) -> Tensor:
        """`inpaint` for symbols: the network reads a known one as a posterior that is certain."""
        if self.symbols is None or precision != math.inf:
            raise UsageError(f"symbols are known exactly or not at all, got precision={precision}. Leave it out.")
        ids, mask = self._ids(len(y), batch_size), mask.expand(len(y), *self.shape)
        cond, known = self._condition(ids, label, cond), known_symbols(self.symbols, y, mask)

        def begin(rows: Integer[Tensor, " batch"], batch: range) -> Iterator[Step]:
            there = rows.to(self.device)
            predict = self.denoiser.given(rows_of(cond, rows, self.device), sampler.guidance, known[there])
            numbers = self._numbers(batch)
            steps = drawing(self.method, predict, sampler, numbers, self.latent_shape, seed, self.dtype)
            return self._evaluated(steps)

        drawn = self._drawn(begin, ids, sampler.steps, batch_size, progress)
        return torch.where(mask.bool(), self.data(y), drawn)

    def restore(
        self,
        y: Tensor | np.ndarray,
        operator: Callable[[Tensor], Tensor],
        precision: float,
        sampler: Sampler | None = None,
        *,
        iterations: int = 5,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw a sample given each linear measurement y = operator(x) + noise of variance 1 / precision.

        Args:
            y: One measurement for each sample, in the units of `operator(x)`.
            operator: A linear (or affine) map of a batch in the units of the data: a blur, a projection, fewer pixels.
            precision: 1 / (standard deviation of the noise)^2.
            sampler: How to draw, by default with 15 steps of sde2; `changes` are fields of it.
            iterations: Backward passes for each prediction. The other arguments are those of `sample`.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:2])
            >>> half = lambda x: torch.nn.functional.avg_pool2d(x, 2)
            >>> model.restore(half(model.values(images)), half, precision=1e3, steps=8).shape
            torch.Size([2, 1, 8, 8])
        """
        given, sampler = as_tensor(y), replace(sampler or Sampler(solver=NOISY_SOLVER), **changes)
        y, nothing = (
            given.to(self.device),
            torch.zeros(len(given), *self.latent_shape, device=self.device, dtype=self.dtype),
        )
        offset = operator(self._in_units(nothing))  # of an affine map, and of the mean of standardized data

        def linear(x: Tensor) -> Tensor:
            return operator(self._in_units(x)) - offset[: len(x)]

        def conditioned(predict: Predictor, rows: Integer[Tensor, " batch"]) -> Predictor:
            return measured(self.method, predict, linear, (y - offset)[rows], precision, iterations)

        return self._restored(
            self._given_measurement(conditioned, sampler), len(y), sampler, seed, label, cond, batch_size, progress
        )

    def interpolate(
        self,
        a: Tensor | np.ndarray,
        b: Tensor | np.ndarray,
        num: int = 8,
        *,
        cond: Condition | None = None,
        tolerance: float = 1e-2,
    ) -> Tensor:
        """Interpolate between samples through the probability flow: `num` samples from each a to its b.

        The flow maps a and b to the noise they come from. What lies between, on the arc of a sphere, is mapped back.

        Args:
            a: Data, one row for each result.
            b: Data of the same shape.
            num: The number of samples from a to b, both included.
            cond: A condition with one row for each result.
            tolerance: Error of each step of the flow, in nats.

        Returns:
            Data of shape (batch, num, *shape).

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:4])
            >>> model.interpolate(images[:2], images[2:], num=3).shape
            torch.Size([2, 3, 1, 8, 8])
        """
        ends = [self.values(each).to(self.device) for each in (a, b)]
        if ends[0].shape != ends[1].shape or num < 2:
            raise UsageError(
                f"interpolation needs num >= 2 and two batches of one shape, got num={num}, {tuple(ends[0].shape)} and "
                f"{tuple(ends[1].shape)}"
            )
        check_condition(cond, len(ends[0]))
        each = torch.arange(len(ends[0])).repeat_interleave(num)
        with self.evaluating():
            predict = self.denoiser.given(rows_of(cond, torch.arange(len(ends[0])), self.device))
            start, end = (flow_encode(self.method, predict, x, tolerance) for x in ends)
            between = self.denoiser.given(rows_of(cond, each, self.device))
            w = arc(start, end, num).flatten(0, 1).to(self.dtype)
            x = flow_decode(self.method, between, w, tolerance)
        return self.data(x).unflatten(0, (-1, num))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager that puts the model into evaluation mode."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)

    def _ids(self, num: int | range, batch_size: int = 1) -> range:
        ids = range(num) if isinstance(num, int) else num
        if len(ids) < 1 or batch_size < 1:
            raise UsageError(f"sampling needs num >= 1 and batch_size >= 1, got num={num}, batch_size={batch_size}")
        return ids

    def _numbers(self, ids: range) -> Int[Tensor, " batch"]:
        return torch.arange(ids.start, ids.stop, ids.step, device=self.device)

    def _condition(self, ids: range, label: int | Sequence[int] | None, cond: Condition | None) -> Condition | None:
        """The condition of samples, given as such or by labels."""
        if cond is not None and label is not None:
            raise UsageError(f"samples have either a label or a condition, got label={label} and cond. Leave one out.")
        cond = self.labels(ids, label) if cond is None else cond
        check_condition(cond, len(ids))
        check_labels(cond, self.classes)
        return rows_of(cond, torch.arange(len(ids)), self.device)

    def _drawn(
        self,
        begin: Callable[[Integer[Tensor, " batch"], range], Iterator[Step]],
        ids: range,
        steps: int,
        batch_size: int,
        progress: Shown,
    ) -> Tensor:
        """The ends of trajectories as data, batch by batch: `begin(rows, ids)` starts those of some of the rows."""
        drawn = []
        with shown(progress, "sample", len(ids) * (steps + 1), "step") as advance:
            for rows in torch.arange(len(ids)).split(batch_size):
                x = torch.empty(0)
                for step in begin(rows, ids[int(rows[0]) : int(rows[-1]) + 1]):
                    x = step.x_hat
                    advance(len(rows))
                drawn.append(self.data(x))
        return torch.cat(drawn)

    def _restored(
        self,
        begin: Callable[[Predictor, Noise, Integer[Tensor, " batch"]], Iterator[Step]],
        num: int,
        sampler: Sampler,
        seed: int,
        label: int | Sequence[int] | None,
        cond: Condition | None,
        batch_size: int,
        progress: Shown,
    ) -> Tensor:
        """One sample for each measurement: `begin(predict, noise, rows)` starts the trajectories of some of them."""
        ids = self._ids(num, batch_size)
        cond = self._condition(ids, label, cond)

        def started(rows: Integer[Tensor, " batch"], batch: range) -> Iterator[Step]:
            predict = self.denoiser.given(rows_of(cond, rows, self.device), sampler.guidance)
            noise = noise_of(sampler, seed, self._numbers(batch), self.latent_shape, self.dtype)
            return self._evaluated(begin(predict, noise, rows))

        return self._drawn(started, ids, sampler.steps, batch_size, progress)

    def _given_measurement(
        self, conditioned: Callable[[Predictor, Integer[Tensor, " batch"]], Predictor], sampler: Sampler
    ) -> Callable[[Predictor, Noise, Integer[Tensor, " batch"]], Iterator[Step]]:
        """Start trajectories from the prior with a predictor that knows a measurement."""
        levels = levels_of(self.method, sampler)

        def begin(predict: Predictor, noise: Noise, rows: Integer[Tensor, " batch"]) -> Iterator[Step]:
            return trajectory(self.method, conditioned(predict, rows), noise, levels, sampler.solver_for(self.method))

        return begin

    def _measurement(self, y: Tensor | np.ndarray) -> Float[Tensor, "batch *data"]:
        """A measurement of data, in the values that the method works with."""
        y = as_tensor(y)
        if not y.is_floating_point():
            raise UsageError(
                f"a measurement is of values, not of bins: got {y.dtype}. Pass model.values(data) with noise."
            )
        return self.values(y).to(self.device)

    def _in_units(self, x: Float[Tensor, "batch *data"]) -> Float[Tensor, "batch *data"]:
        """Values in the units of the data, without rounding to bins."""
        return self.kind.data(x) if isinstance(self.kind, Standardize) else x

    def _evaluated(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of a trajectory in evaluation mode, and the one check that samples are finite."""
        x = torch.empty(0)
        while True:
            with self.evaluating():
                step = next(steps, None)
            if step is None:
                break
            x = step.x_hat
            yield step
        finite = torch.isfinite(x).flatten(1).all(1) if x.ndim > 1 else torch.isfinite(x)
        if not bool(finite.all()):
            raise NonFinite(
                f"{int((~finite).sum())} of {len(x)} samples drawn together hold NaN or infinity: the network's "
                f"predictions are not finite"
            )


def rows_of(cond: Condition | None, ids: Integer[Tensor, " batch"], device: torch.device) -> Condition | None:
    """The condition's rows for these samples, moved to the device of the network."""
    if isinstance(cond, dict):
        return {name: value[ids.to(value.device)].to(device) for name, value in cond.items()}
    return None if cond is None else cond[ids.to(cond.device)].to(device)
