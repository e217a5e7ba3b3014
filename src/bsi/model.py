"""`Model`: a network, a method and a description of the data, the object that most users hold.

    model = bsi.Model(MyNet(), bsi.BSI(), shape=(3, 32, 32), data=bsi.Bins.uint8())
    model(x).mean().backward()                  # 2 L_M / n per sample; DDP and torch.compile can wrap the model
    images = model.sample(16, seed=0)
    print(model.bits_per_dim(test))             # the bound, with its two errors

A model draws the noise and calls the functions that take (method, predict, ...). density.py has the loss, predictions
and bounds, this file samples and storage.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bsi import flow
from bsi.conditioning import denoising, inpainted, measured
from bsi.denoiser import Condition, check_condition
from bsi.density import Array, Density, Rows
from bsi.errors import NonFinite, UsageError
from bsi.methods.base import Predictor
from bsi.progress import Shown, shown
from bsi.sampler import NOISY_SOLVER, Sampler
from bsi.sampling import Step, drawing, noise_of
from bsi.symbols import known_symbols
from bsi.values import Standardize, as_tensor
from bsi.variance import Variance

Label = int | Sequence[int]  # the class of all samples, or classes that samples take in turn


class Model(Density):
    """A network, a method and a description of the data. Integers are bin indices or symbols, floats are values.

    `model(x)` is the training loss of each sample, so that `torch.compile` and `DistributedDataParallel` can wrap the
    model. A prediction is `model.predict(latent, level)`.

    Args:
        backbone: is called as `backbone(input, t)`, or `backbone(input, t, cond)` with a condition. `input` are latents
            (scaled to unit variance with the `edm` parametrization, BSI's), t is in [0, 1], 0 at the noisy end.
        method: `bsi.BSI()`, `bsi.BFN()`, `bsi.VDM()` or your own.
        shape: of one sample.
        data: the kind of the data: `bsi.Bins` for integers that are numbers, such as 8-bit images, `bsi.Symbols` for
            integers without an order, such as text, or `bsi.Standardize` for continuous data. By default the data is
            continuous, in its own units.
        parametrization: what the network predicts; by default what the method's networks do.
        sigma_data: the standard deviation of the data, for preconditioning.
        class_names: names of the labels 0, 1, ...
        autoencoder: of a model of latents (`bsi.values.Latents`): its samples and its data are then images.
        consistent: whether the network was tuned by `bsi.distill` to draw samples in few steps.
    """

    def sample(
        self,
        num: int | range,
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        label: Label | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw samples: bin indices (uint8 for 8-bit images), symbols, or values. Sample i depends on (seed, i) alone.

        Raises before the first evaluation if the sampler does not suit the method, and if a sample is not finite.

        Args:
            num: How many samples, or a range of their numbers i.
            sampler: How to draw them, by default `model.sampler`; `changes` are fields of it: `model.sample(16,
                steps=32, guidance=2.0)`.
            label: The class of all samples, or a sequence of classes that sample i takes in turn: `range(10)`.
            cond: A condition with one row for each sample, in place of `label`.
            batch_size: Samples that are drawn together.
            progress: Show progress on stderr, or a function that is called with the number of samples after each step.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> model.sample(4, steps=8, seed=1).shape
            torch.Size([4, 1, 8, 8])
        """
        sampler = self._sampler(sampler, changes)
        variance = self.variance(sampler.variance)

        def begin(predict: Predictor, rows: Rows, numbers: Rows) -> Iterator[Step]:
            return self._steps(predict, sampler, numbers, seed, variance)

        return self._draw(begin, num, sampler, label, cond, batch_size, progress)

    def trajectory(
        self,
        num: int | range,
        sampler: Sampler | None = None,
        *,
        seed: int = 0,
        label: Label | None = None,
        cond: Condition | None = None,
        **changes: Any,
    ) -> Iterator[Step]:
        """Iterate over the steps of `sample`, as values; the x_hat of the last step is the sample.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> for step in model.trajectory(2, steps=3):
            ...     print(f"{float(step.level):.3g}", tuple(step.x_hat.shape))
            0.01 (2, 1, 8, 8)
            0.0231 (2, 1, 8, 8)
            1.58 (2, 1, 8, 8)
            1e+04 (2, 1, 8, 8)
        """
        sampler, numbers = self._sampler(sampler, changes), _numbers(num)
        predict = self._given(self._condition(numbers, label, cond), torch.arange(len(numbers)), sampler.guidance)
        variance = self.variance(sampler.variance)
        return self._evaluated(self._steps(predict, sampler, numbers.to(self.device), seed, variance))

    def denoise(
        self,
        y: Array,
        precision: float,
        *,
        steps: int = Sampler.steps,
        solver: str = NOISY_SOLVER,
        seed: int = 0,
        label: Label | None = None,
        cond: Condition | None = None,
        guidance: float = 1.0,
        batch_size: int = 256,
        progress: Shown = False,
    ) -> Tensor:
        """Draw a sample from p(x | y) for each measurement y = x + noise of variance 1 / precision.

        This is exact up to the network's errors: see `bsi.conditioning`. Repeat a measurement for several draws given
        it: `y.expand(8, *model.shape)`. The other arguments are those of `sample`.

        Args:
            y: Floats in the units of the data; for binned data its values, e.g. in [-1, 1].
            precision: 1 / (standard deviation of the noise)^2, in the same units.
            solver: One that adds the noise of measurements: posterior or sde2.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:2])
            >>> y = model.values(images) + 0.4 * torch.randn(2, 1, 8, 8)
            >>> model.denoise(y, precision=1 / 0.4**2).shape
            torch.Size([2, 1, 8, 8])
        """
        self.check_denoiser()
        self.check_direct("denoising")
        std = self.kind.std if isinstance(self.kind, Standardize) else 1.0
        if isinstance(std, tuple):
            raise UsageError("the data is standardized with several std. Use model.restore(y, lambda x: x, precision).")
        y = as_tensor(y)
        if not y.is_floating_point():
            raise UsageError(f"a measurement is of values, not bins, got {y.dtype}. Pass model.values(data) + noise.")
        y, sampler = self.values(y).to(self.device), Sampler(steps, solver, guidance=guidance)

        def begin(predict: Predictor, rows: Rows, numbers: Rows) -> Iterator[Step]:
            noise = noise_of(sampler, seed, numbers, self.latent_shape, self.dtype)
            return denoising(self.method, predict, noise, y[rows], precision * std**2, steps, solver)

        return self._draw(begin, len(y), sampler, label, cond, batch_size, progress)

    def inpaint(
        self,
        x: Array,
        mask: Array,
        sampler: Sampler | None = None,
        *,
        precision: float = math.inf,
        iterations: int = 5,
        seed: int = 0,
        label: Label | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw the unknown part of each sample, given the part that is known. By default with 15 steps of sde2.

        Args:
            x: Data; ignored where the mask is 0.
            mask: 1 or True where x is known; one for all samples, or one for each. One for all may have the shape
                (height, width) or (1, height, width) for images with several channels.
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
        self.check_denoiser()
        self.check_direct("inpainting")
        y, mask = self.values(x).to(self.device), as_tensor(mask).to(self.device, self.dtype)
        if mask.shape != y.shape[:1] + self.shape and not _expands(mask.shape, self.shape):
            got = f"got {tuple(mask.shape)} for {len(y)} samples of {self.shape}"
            raise UsageError(f"a mask has the shape of one sample (or expands to it) or of all, {got}.")
        if self.symbols is not None and precision != math.inf:
            raise UsageError(f"symbols are known exactly or not at all, got precision={precision}. Leave it out.")
        mask, sampler = mask.expand(len(y), *self.shape), replace(sampler or Sampler(solver=NOISY_SOLVER), **changes)
        known = None if self.symbols is None else known_symbols(self.symbols, y, mask)

        def begin(predict: Predictor, rows: Rows, numbers: Rows) -> Iterator[Step]:
            if known is None:  # otherwise the network reads a known symbol as a posterior that is certain
                predict = inpainted(self.method, predict, y[rows], mask[rows], precision, iterations)
            return self._steps(predict, sampler, numbers, seed)

        drawn = self._draw(begin, len(y), sampler, label, cond, batch_size, progress, known)
        return torch.where(mask.bool(), self.data(y), drawn) if precision == math.inf else drawn

    def restore(
        self,
        y: Array,
        operator: Callable[[Tensor], Tensor],
        precision: float,
        sampler: Sampler | None = None,
        *,
        iterations: int = 5,
        seed: int = 0,
        label: Label | None = None,
        cond: Condition | None = None,
        batch_size: int = 256,
        progress: Shown = False,
        **changes: Any,
    ) -> Tensor:
        """Draw a sample given each linear measurement y = operator(x) + noise of variance 1 / precision.

        Args:
            operator: A linear (or affine) map of a batch in the units of the data: a blur, a projection, fewer pixels.
            iterations: Backward passes for each prediction. The other arguments are those of `sample`, by default with
                15 steps of sde2.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:2])
            >>> half = lambda x: torch.nn.functional.avg_pool2d(x, 2)
            >>> model.restore(half(model.values(images)), half, precision=1e3, steps=8).shape
            torch.Size([2, 1, 8, 8])
        """
        self.check_denoiser()
        self.check_direct("restoring")
        y, sampler = as_tensor(y).to(self.device), replace(sampler or Sampler(solver=NOISY_SOLVER), **changes)
        units = self.kind.data if isinstance(self.kind, Standardize) else lambda x: x  # not rounded to bins
        nothing = torch.zeros(len(y), *self.latent_shape, device=self.device, dtype=self.dtype)
        offset = operator(units(nothing))  # of an affine map, and of the mean of standardized data
        differences = y - offset

        def linear(x: Tensor) -> Tensor:
            return operator(units(x)) - offset[: len(x)]

        def begin(predict: Predictor, rows: Rows, numbers: Rows) -> Iterator[Step]:
            predict = measured(self.method, predict, linear, differences[rows], precision, iterations)
            return self._steps(predict, sampler, numbers, seed)

        return self._draw(begin, len(y), sampler, label, cond, batch_size, progress)

    def interpolate(
        self, a: Array, b: Array, num: int = 8, *, cond: Condition | None = None, tolerance: float = 1e-2
    ) -> Tensor:
        """Interpolate between samples through the probability flow: `num` samples from each a to its b, both included.

        The flow maps a and b to the noise they come from. Points between them, on the arc of a sphere, are mapped back.

        Args:
            tolerance: Error of each step of the flow, in nats.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = torch.tensor(bsi.data.open_dataset("digits").test[:4])
            >>> model.interpolate(images[:2], images[2:], num=3).shape
            torch.Size([2, 3, 1, 8, 8])
        """
        self.check_denoiser()
        start, end = (self.values(each).to(self.device) for each in (a, b))
        if start.shape != end.shape or num < 2:
            shapes = f"{tuple(start.shape)} and {tuple(end.shape)}"
            raise UsageError(f"interpolation needs num >= 2 and two batches of one shape, got num={num}, {shapes}")
        check_condition(cond, len(start))
        rows, method = torch.arange(len(start)), self.method
        with self.evaluating():
            first, last = (flow.flow_encode(method, self._given(cond, rows), x, tolerance) for x in (start, end))
            w = flow.arc(first, last, num).flatten(0, 1).to(self.dtype)
            x = flow.flow_decode(method, self._given(cond, rows.repeat_interleave(num)), w, tolerance)
        return self.data(x).unflatten(0, (-1, num))

    def labels(self, numbers: range | Rows, label: Label | None) -> Int[Tensor, " batch"] | None:
        """The label of each of these samples: one for all, or sample i's from the sequence in turn."""
        if label is None:
            return None
        if self.classes == 0:
            raise UsageError(f"this network was trained without labels, got label={label}. Train it with labels.")
        known = torch.as_tensor([label] if isinstance(label, int) else list(label))
        return known[torch.as_tensor(numbers) % len(known)]

    def _sampler(self, given: Sampler | None, changes: dict[str, Any]) -> Sampler:
        default = self.sampler.with_variance(changes.get("variance", self.sampler.variance))
        return self.named(replace(given or default, **changes))

    def _draw(
        self,
        begin: Callable[[Predictor, Rows, Rows], Iterator[Step]],
        num: int | range,
        sampler: Sampler,
        label: Label | None,
        cond: Condition | None,
        batch_size: int,
        progress: Shown,
        known: Tensor | None = None,
    ) -> Tensor:
        """The ends of trajectories as data; `begin(predict, rows, numbers)` starts those of a batch of samples."""
        numbers, drawn = _numbers(num, batch_size), []
        cond = self._condition(numbers, label, cond)
        with shown(progress, "sample", len(numbers) * (sampler.steps + 1), "step") as advance:
            for rows in torch.arange(len(numbers)).split(batch_size):
                predict = self._given(cond, rows, sampler.guidance, None if known is None else known[rows])
                for step in self._evaluated(begin(predict, rows, numbers[rows].to(self.device))):
                    x = step.x_hat
                    advance(len(rows))
                drawn.append(self.data(x))
        return torch.cat(drawn)

    def _steps(
        self, predict: Predictor, sampler: Sampler, numbers: Rows, seed: int, variance: Variance | None = None
    ) -> Iterator[Step]:
        return drawing(self.method, predict, sampler, numbers, self.latent_shape, seed, self.dtype, variance)

    def _condition(self, numbers: Rows, label: Label | None, cond: Condition | None) -> Condition | None:
        """The condition of samples, given as such or by labels."""
        if cond is not None and label is not None:
            raise UsageError(f"samples have either a label or a condition, got label={label} and cond. Leave one out.")
        cond = self.labels(numbers, label) if cond is None else cond
        check_condition(cond, len(numbers), self.classes)
        return cond

    def _evaluated(self, steps: Iterator[Step]) -> Iterator[Step]:
        """The steps of a trajectory in evaluation mode, and the one check that samples are finite."""
        while True:
            with self.evaluating():
                step = next(steps, None)
            if step is None:
                break
            x = step.x_hat
            yield step
        if bad := int((~torch.isfinite(x)).reshape(len(x), -1).any(1).sum()):
            raise NonFinite(f"{bad} of {len(x)} samples drawn together hold NaN or infinity, as the predictions do")

    # ---- Storage -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, source: str | Path, backbone: nn.Module | None = None, revision: str | None = None
    ) -> Model:
        """Load a model onto the CPU, in evaluation mode. Files hold weights and a description, and no code.

        Args:
            source: The name of an installed network (`digits`; `cifar10` and `cifar10-classes` with the extra
                `networks`), a folder of `save_pretrained`, a run folder, an exported file, or a repository of the
                Hugging Face hub, `USER/NAME`, that `push_to_hub` made.
            backbone: Your own network, if the model has one.
            revision: A branch, tag or commit of a hub repository.

        Example:

            >>> bsi.Model.from_pretrained("digits").sample(4, steps=8).shape
            torch.Size([4, 1, 8, 8])
        """
        from bsi.runtime import export

        if export.is_repository(source):
            source = export.download(str(source), revision)
        return export.load(source, backbone=backbone)

    def save_pretrained(self, folder: str | Path, name: str | None = None) -> Path:
        """Write the model as a folder: model.safetensors, config.json and a model card, named after the folder.

        A network of `bsi.backbones` is rebuilt by `from_pretrained`; your own is passed again:
        `bsi.Model.from_pretrained("my-model", backbone=MyNet())`.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> folder = model.save_pretrained("my-digits")
            >>> bsi.Model.from_pretrained(folder).shape
            (1, 8, 8)
        """
        from bsi.runtime import export

        name = name or re.sub(r"\W+", "-", Path(folder).resolve().name).strip("-") or "model"
        return export.write_model_folder(export.Trained.of(self, name), Path(folder))

    def push_to_hub(self, repository: str, private: bool = True) -> str:
        """Upload the model to `USER/NAME` of the Hugging Face hub with the token of `hf auth login`: its address."""
        from bsi.runtime import export

        with tempfile.TemporaryDirectory() as folder:
            return export.upload(self.save_pretrained(folder, repository.rpartition("/")[2]), repository, private)


def _expands(shape: torch.Size, to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def _numbers(num: int | range, batch_size: int = 1) -> Rows:
    """The numbers of the samples to draw."""
    ids = range(num) if isinstance(num, int) else num
    if len(ids) < 1 or batch_size < 1:
        raise UsageError(f"sampling needs num >= 1 and batch_size >= 1, got num={num}, batch_size={batch_size}")
    return torch.arange(ids.start, ids.stop, ids.step)
