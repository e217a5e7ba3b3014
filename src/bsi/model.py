"""`Model`: the main user interface. It draws the noise and calls the functions that take (method, predict, ...).

    model = bsi.Model(MyNet(), bsi.BSI(), shape=(3, 32, 32), bins=bsi.Bins.uint8())
    model(x).mean().backward()                  # 2 L_M / n per sample; DDP and torch.compile can wrap the model
    images = model.sample(16, seed=0)
    print(model.bits_per_dim(test))             # the bound, with its two errors

Integer tensors are bin indices, floats are values. Everything outside the network is computed in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn

from bsi.bound import EvaluatedModel, Samples, estimate
from bsi.checks import as_tensor, check_finite, check_method, check_repeated, check_resolution
from bsi.denoiser import Condition, Denoiser, check_condition, check_labels
from bsi.elbo import Elbo, Estimator, Proposals
from bsi.errors import NonFinite, UsageError
from bsi.levels import low_discrepancy
from bsi.methods.base import Method, Parametrization, Predictor
from bsi.objective import Weight, training_loss
from bsi.sampler import Sampler
from bsi.sampling import Step, drawing
from bsi.values import Bins, Standardize
from bsi.variance import Variance, named_variance

__all__ = ["Model"]

# Whether to show progress, or what is called with the number of samples after each of their steps.
Shown = bool | Callable[[int], object]


class Model(nn.Module):
    """A network, a method and a description of the data.

    Args:
        backbone: is called as `backbone(input, t)`, or `backbone(input, t, cond)` with a condition. `input` are latents
            (scaled to unit variance with the `edm` parametrization, BSI's), t is in [0, 1], 0 at the noisy end.
        method: `bsi.BSI()`, `bsi.BFN()`, `bsi.VDM()` or your own.
        shape: of one sample.
        bins: describes data that is stored as integers; without it data is continuous.
        standardize: the units of continuous data.
        parametrization: what the network predicts; by default what the method's networks do.
        sigma_data: the standard deviation of the data, for preconditioning.
        class_names: names of the labels 0, 1, ...
    """

    def __init__(
        self,
        backbone: nn.Module,
        method: Method,
        shape: tuple[int, ...],
        bins: Bins | None = None,
        standardize: Standardize | None = None,
        parametrization: Parametrization | None = None,
        sigma_data: float = 1.0,
        class_names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        check_method(method)
        if bins is not None and standardize is not None:
            raise UsageError("data is either binned or standardized, not both. Drop bins or standardize.")
        self.method, self.shape, self.bins, self.standardize = method, tuple(shape), bins, standardize
        check_resolution(method, torch.finfo(torch.float32).eps * (1.0 if bins is None else max(-bins.low, bins.high)))
        clip = (bins.low, bins.high) if method.clips and bins is not None else None
        self.denoiser = Denoiser(backbone, method, parametrization, sigma_data, clip)
        self.class_names = class_names
        if class_names and self.classes not in (None, len(class_names)):
            raise UsageError(f"each label needs one name, got {len(class_names)} names for {self.classes} labels")

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
        """Convert data to the values that the method works with: bin centers, or standardized continuous data."""
        data = as_tensor(data)
        if data.shape[1:] != self.shape:
            raise UsageError(
                f"data must have the shape (batch, {', '.join(map(str, self.shape))}), got {tuple(data.shape)}"
            )
        if data.is_floating_point():
            data = data.to(torch.promote_types(data.dtype, self.dtype))
            x = data if self.standardize is None else self.standardize.apply(data)
            return x.to(self.dtype) if any(p.is_floating_point() for p in self.parameters()) else x
        if self.bins is None:
            raise UsageError(
                f"integer data needs bins, got {data.dtype}. Pass bins=bsi.Bins.uint8() for 8-bit images, or convert "
                f"continuous data to floats."
            )
        return self.bins.values(data, self.dtype)

    def check(self, data: Tensor | np.ndarray) -> None:
        """Raise if data is not finite or lies outside its bins. Reads the data: `forward` does so on the CPU only."""
        data = as_tensor(data)
        if len(data) < 1:
            raise UsageError("a loss and a bound need at least one sample, got an empty batch")
        if not data.is_floating_point():
            if self.bins is not None:
                self.bins.check(data)
            return
        check_finite(data)
        if self.bins is not None:
            self.bins.check_values(data)

    def check_density(self, data: Tensor) -> None:
        """Raise if continuous data is too coarse for a density, or warn: see `bsi.checks.check_resolution`.

        Repeated values have a probability, not a density: a model that learns them can reach any density.
        """
        if self.bins is not None or not data.is_floating_point():
            return
        # The distance between neighboring numbers in the type of the data, and in the type that it is computed in.
        x, coarse = self.values(data), torch.finfo(data.dtype).eps * data.abs().amax(0, keepdim=True).double()
        stored = (self.values(coarse) - self.values(torch.zeros_like(coarse))).max()
        check_resolution(self.method, max(float(stored), torch.finfo(x.dtype).eps * float(x.abs().max())))
        check_repeated(data)

    def forward(
        self, data: Tensor, cond: Condition | None = None, weight: Weight | None = None
    ) -> Float[Tensor, " batch"]:
        """The training loss 2 L_M / n of each sample, at levels stratified over the global batch."""
        data = as_tensor(data)
        if data.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check(data)
        check_condition(cond, len(data))
        x = self.values(data)
        return training_loss(self.method, self.denoiser.given(cond), x, _levels(x), torch.randn_like(x), weight)

    def sample(
        self,
        num: int | range,
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        label: int | Sequence[int] | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Callable[[int], object] | None = None,
        **changes: Any,
    ) -> Tensor:
        """Draw samples: bin indices (uint8 for 8-bit images) or values. Sample i depends on (seed, i) alone.

        Args:
            num: how many samples, or a range of their numbers i.
            sampler: how to draw them; `changes` are fields of it: `model.sample(16, steps=32, guidance=2.0)`.
            seed: `bsi sample` with the same seed draws the same samples.
            label: the class of all samples, or a sequence of classes that sample i takes in turn: `range(10)`.
            cond: a condition with one row for each sample, in place of `label`.
            batch_size: samples that are drawn together.
            progress: is called with the number of samples after each of their steps + 1 predictions.

        Raises:
            NonFinite: if a sample holds NaN or infinity.
        """
        ids = range(num) if isinstance(num, int) else num
        if len(ids) < 1 or batch_size < 1:
            raise UsageError(f"sampling needs num >= 1 and batch_size >= 1, got num={num}, batch_size={batch_size}")
        if cond is not None and label is not None:
            raise UsageError(f"samples have either a label or a condition, got label={label} and cond. Leave one out.")
        sampler = replace(sampler or Sampler(), **changes)
        cond = self.labels(ids, label) if cond is None else cond
        check_condition(cond, len(ids))
        check_labels(cond, self.classes)
        drawn = []
        for rows in torch.arange(len(ids)).split(batch_size):
            batch = ids[int(rows[0]) : int(rows[-1]) + 1]
            for step in self.trajectory(batch, sampler, seed=seed, cond=_rows(cond, rows, self.device)):
                x = step.x_hat
                if progress is not None:
                    progress(len(rows))
            drawn.append(self.data(x))
        return torch.cat(drawn)

    def trajectory(
        self, ids: range, sampler: Sampler, *, seed: int = 0, cond: Condition | None = None
    ) -> Iterator[Step]:
        """Every step of the samples `ids`, as values; the x_hat of the last step is the sample.

        Raises:
            UsageError: before the first evaluation, if the sampler does not suit the method.
            NonFinite: after the last step, if a sample holds NaN or infinity.
        """
        predict = self.denoiser.given(cond, sampler.guidance)
        numbers = torch.arange(ids.start, ids.stop, ids.step, device=self.device)
        return self._evaluated(drawing(self.method, predict, sampler, numbers, self.shape, seed, self.dtype), ids)

    def _evaluated(self, steps: Iterator[Step], ids: range) -> Iterator[Step]:
        """The steps of a trajectory in evaluation mode, and the one check that samples are finite."""
        x = torch.empty(0)
        while True:
            with self.evaluating():
                step = next(steps, None)
            if step is None:
                break
            x = step.x_hat
            yield step
        finite = torch.isfinite(x).reshape(len(ids), -1).all(1)
        if not bool(finite.all()):
            raise NonFinite(
                f"{int((~finite).sum())} of the samples {ids[0]} to {ids[-1]} hold NaN or infinity: the network's "
                f"predictions are not finite"
            )

    def labels(self, ids: range, label: int | Sequence[int] | None) -> Int[Tensor, " batch"] | None:
        """The label of each of these samples: one for all, or sample i's from the sequence in turn."""
        if label is None:
            return None
        if self.classes == 0:
            raise UsageError(f"this network was trained without labels, got label={label}. Train it with labels.")
        known = torch.as_tensor([label] if isinstance(label, int) else list(label))
        return known[torch.arange(ids.start, ids.stop, ids.step) % len(known)]

    def data(self, x: Float[Tensor, "batch *data"]) -> Tensor:
        """Convert values back to data: bin indices by rounding, or the original units by undoing `standardize`."""
        if self.bins is not None:
            return self.bins.indices(x)
        return x if self.standardize is None else self.standardize.undo(x)

    def elbo(
        self,
        data: Tensor | np.ndarray | Samples,
        cond: Condition | None = None,
        measure: int = 5,
        recon: int = 2,
        finite_k: int | None = None,
        proposal: Proposals = "loguniform",
        control: bool = True,
        target_error: float | None = None,
        seed: int = 0,
        batch_size: int = 256,
        progress: bool = False,
        variance: Variance | None = None,
    ) -> Elbo:
        """The bound of each sample, by default with the paper's `measure` levels and `recon` reconstructions.

        The other arguments are those of `bsi.elbo.Estimator`. `proposal="fitted"` and `target_error` together reach a
        given error with the fewest evaluations. With `finite_k`, a `variance` (`fit_variance`) makes the bound tighter.
        """
        if variance is not None and finite_k is None:
            raise UsageError("a variance belongs to finitely many steps: pass finite_k too, or leave variance out.")
        estimator = Estimator(measure, recon, finite_k, proposal, control, target_error, seed, batch_size)
        with self.evaluating():
            return estimate(replace(self.on(data, cond), variance=variance), estimator, progress=progress)

    bits_per_dim = elbo  # an alias under the more common name

    def fit_variance(
        self, data: Tensor | np.ndarray, kind: str = "dct", seed: int = 0, batch_size: int = 256
    ) -> Variance:
        """The predictive variance of transitions, fitted to training samples: for `elbo`, sampling and compression.

        Args:
            data: Training samples; a few thousand are enough. Test samples would make the bound too good.
            kind: `level`, `pixels`, `dct` or `pca`: see `bsi.variance.named_variance`.
        """
        self.check(data)
        x = self.values(data).to(self.device)
        with self.evaluating():
            return named_variance(kind, self.method, self.denoiser, x, seed, batch_size)

    def on(
        self,
        data: Tensor | np.ndarray | Samples,
        cond: Condition | None = None,
        ids: Sequence[int] | np.ndarray | None = None,
    ) -> EvaluatedModel:
        """This model on the samples `ids` of the data (by default all), as the argument of `bsi.bound.estimate`.

        The model must be in evaluation mode.
        """
        if isinstance(data, np.ndarray) or not isinstance(data, Samples):
            data = as_tensor(data)
        check_condition(cond, len(data))
        if isinstance(data, Tensor):
            self.check(data)
            self.check_density(data)
        chosen = torch.arange(len(data)) if ids is None else torch.as_tensor(ids)
        if len(chosen) < 1:
            raise UsageError("a bound needs at least one sample, got none")

        def x(places: Integer[Tensor, " batch"]) -> Float[Tensor, "batch *data"]:
            rows = chosen[places.cpu()]
            if isinstance(data, Tensor):
                samples = data[rows.to(data.device)]
            else:
                samples = data.take(rows.numpy())
                self.check(samples)
                self.check_density(samples)
            return self.values(samples).to(self.device)

        def predict(places: Integer[Tensor, " batch"]) -> Predictor:
            return self.denoiser.given(_rows(cond, chosen[places.cpu()], self.device))

        return EvaluatedModel(
            method=self.method,
            predict=predict,
            x=x,
            count=len(chosen),
            shape=self.shape,
            bins=self.bins,
            device=self.device,
            log_determinant=0.0 if self.standardize is None else self.standardize.log_determinant,
        )

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """Move the model, or convert it to float32 or float64."""
        given = [value.dtype if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
        if torch.float16 in given or torch.bfloat16 in given:
            raise UsageError(
                "the weights of a model must be float32 or float64, got a half precision. For bfloat16 inside one of "
                "our networks set model.denoiser.backbone.compute_dtype = torch.bfloat16; your own can convert its "
                "input."
            )
        return super().to(*args, **kwargs)

    def half(self) -> Model:
        return self.to(torch.float16)

    def bfloat16(self) -> Model:
        return self.to(torch.bfloat16)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager that puts the model into evaluation mode."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def _rows(cond: Condition | None, ids: Integer[Tensor, " batch"], device: torch.device) -> Condition | None:
    """The condition's rows for these samples, moved to the device of the network."""
    if isinstance(cond, dict):
        return {name: value[ids.to(value.device)].to(device) for name, value in cond.items()}
    return None if cond is None else cond[ids.to(cond.device)].to(device)


def _levels(x: Float[Tensor, "batch *data"]) -> Float[Tensor, " batch"]:
    """t for this rank's part of the global batch, with the same delta on all ranks."""
    delta = torch.rand((), dtype=torch.float64, device=x.device)
    if not (dist.is_available() and dist.is_initialized()):
        return low_discrepancy(len(x), delta)
    dist.broadcast(delta, src=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    return low_discrepancy(world * len(x), delta)[rank * len(x) : (rank + 1) * len(x)]
