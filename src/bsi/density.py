"""`Density`: the part of `bsi.Model` that evaluates data: the training loss, predictions, bounds and likelihoods.

Everything outside the network is computed in float32 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Integer
from torch import Tensor, nn

from bsi import flow
from bsi.bound import EvaluatedModel, SampleSource, estimate, noise
from bsi.denoiser import Condition, Denoiser, check_condition
from bsi.discreteness import searched, warn_discrete
from bsi.elbo import Elbo, Estimator, Proposals
from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, over
from bsi.latents import Encoded, EncoderDecoder, moments
from bsi.levels import low_discrepancy
from bsi.methods import check_resolution, last_noise
from bsi.methods.base import Method, Parametrization, Predictor
from bsi.objective import Weight, training_loss
from bsi.progress import shown
from bsi.rng import standard_normal
from bsi.sampler import CONSISTENCY, Sampler
from bsi.values import CONTINUOUS, Bins, DataKind, Latents, Standardize, Symbols, as_tensor, check_finite
from bsi.variance import Variance, named_variance

DEQUANTIZATION = 1 << 27  # the stream of noise for the positions within bins, apart from those of probes

Array = Tensor | np.ndarray
Rows = Integer[Tensor, " batch"]


class Density(nn.Module):
    """A network, a method and a description of the data. See `bsi.Model`, which also draws samples."""

    def __init__(
        self,
        backbone: nn.Module,
        method: Method,
        shape: tuple[int, ...],
        data: DataKind | None = None,
        parametrization: Parametrization | None = None,
        sigma_data: float = 1.0,
        class_names: tuple[str, ...] = (),
        consistent: bool = False,
        autoencoder: EncoderDecoder | None = None,
    ) -> None:
        super().__init__()
        if isinstance(method, type) or not isinstance(method, Method):
            got = f"{method.__name__}. Pass {method.__name__}()" if isinstance(method, type) else repr(method)
            raise UsageError(f"a method must be an object, bsi.BSI(), bsi.BFN(), bsi.VDM() or like them: got {got}.")
        kind = CONTINUOUS if data is None else data
        if not isinstance(kind, DataKind):
            raise UsageError(f"data must be bsi.Bins, bsi.Symbols or bsi.Standardize, got {kind!r:.80}.")
        if isinstance(kind, Latents) != (autoencoder is not None):
            given = f"data={type(kind).__name__} and autoencoder={type(autoencoder).__name__}"
            raise UsageError(f"latents and their autoencoder belong together, got {given}. Pass both, or neither.")
        self.method, self.stored_shape, self.kind = method, tuple(shape), kind
        self.latent_shape = kind.latent_shape(self.stored_shape)
        self.shape = kind.shape if isinstance(kind, Latents) else self.stored_shape
        self._autoencoder = (autoencoder,)  # not a part of this module: neither trained nor averaged with it
        largest = max(-kind.low, kind.high) if isinstance(kind, Bins) else 1.0
        check_resolution(method, torch.finfo(torch.float32).eps * largest)
        clip = (kind.low, kind.high) if method.clips and isinstance(kind, Bins) else None
        self.denoiser = Denoiser(backbone, method, parametrization, sigma_data, clip, self.symbols, consistent)
        self.class_names = class_names
        self.origin: object = None  # the description of the file that the model was loaded from
        self.sampler = Sampler()  # how `sample` draws by default; a loaded run has that of its recipe
        self.variances: dict[str, Variance] = {}
        if class_names and self.classes not in (None, len(class_names)):
            raise UsageError(f"each label needs one name, got {len(class_names)} names for {self.classes} labels")

    def extra_repr(self) -> str:
        """What `print(model)` shows before the network."""
        return f"{self.method}, shape={self.shape}, data={self.kind!s:.200}"

    @property
    def autoencoder(self) -> EncoderDecoder | None:
        """The autoencoder of a model of latents."""
        return self._autoencoder[0]

    @property
    def bins(self) -> Bins | None:
        """The values of binned data; for a model of latents those of the images."""
        return self.kind.bins if isinstance(self.kind, Latents) else self.kind if isinstance(self.kind, Bins) else None

    @property
    def symbols(self) -> Symbols | None:
        return self.kind if isinstance(self.kind, Symbols) else None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computations outside the network: float64 after `model.double()`, else float32."""
        return torch.float64 if any(p.dtype == torch.float64 for p in self.parameters()) else torch.float32

    @property
    def classes(self) -> int | None:
        """The number of labels of the network; None if it has no attribute `num_classes`."""
        return getattr(self.denoiser.backbone, "num_classes", None)

    # ---- Data --------------------------------------------------------------------------------------------------------

    def values(self, data: Array) -> Data:
        """Convert data to the method's values: bin centers, embedded symbols or standardized continuous data.

        Images of a model of latents, and stored latents, become the standardized means of their latents.
        """
        data = as_tensor(data)
        expected = self.stored_shape if data.is_floating_point() else self.shape
        if data.shape[1:] != expected:
            shape = ", ".join(map(str, expected))
            raise UsageError(f"data must have the shape (batch, {shape}), got {tuple(data.shape)}")
        if isinstance(self.kind, Latents) and self.autoencoder is not None:
            return self.kind.values(moments(self.kind, self.autoencoder, data)[0], self.dtype)
        if not data.is_floating_point():
            return self.kind.values(data, self.dtype)
        x = self.kind.values(data, torch.promote_types(data.dtype, self.dtype))
        return x.to(self.dtype) if any(p.is_floating_point() for p in self.parameters()) else x

    def data(self, x: Data) -> Tensor:
        """Convert values back to data: the nearest bin or symbol, or the original units; latents to images."""
        data = self.kind.data(x) if self.autoencoder is None or self.bins is None else self.bins.data(self.decoded(x))
        return data.reshape(len(x), *self.shape)

    def decoded(self, x: Data) -> Tensor:
        """Values as they are shown: for a model of latents the values of images, otherwise x itself."""
        return x if self.autoencoder is None else self.autoencoder.decode(self.kind.data(x))

    def named(self, sampler: Sampler) -> Sampler:
        """The sampler with an explicit solver. A network tuned by `bsi.distill` has its own, whatever the grid."""
        if not self.denoiser.consistent:
            return sampler.named(self.method)
        if sampler.solver not in (None, CONSISTENCY) or sampler.variance != "none":
            got = f"solver={sampler.solver!r}, variance={sampler.variance!r}"
            raise UsageError(f"a distilled network draws samples with its own solver, got {got}. Leave them out.")
        return replace(sampler, solver=CONSISTENCY)

    def check_denoiser(self) -> None:
        """Raise for a network tuned by `bsi.distill`, which has no bound and predicts no means."""
        if self.denoiser.consistent:
            raise UsageError(
                "a distilled network has no ELBO, no likelihood and no posterior: it only draws samples. Use the "
                "network that it was tuned from."
            )

    def check_direct(self, what: str) -> None:
        """Raise for a model of latents, for what needs one of the images themselves."""
        if self.autoencoder is not None:
            raise UsageError(
                f"{what} needs a model of the images themselves, got one of their latents. Train one on images."
            )

    def check(self, data: Array) -> None:
        """Raise if data is not finite or not of its kind. Reads the data: `forward` does so on the CPU only."""
        data = as_tensor(data)
        if len(data) < 1:
            raise UsageError("a loss and a bound need at least one sample, got an empty batch")
        if data.is_floating_point():
            check_finite(data)
        (self.bins if self.bins is not None and not data.is_floating_point() else self.kind).check(data)

    def check_resolution(self, data: Tensor) -> None:
        """Raise if continuous data is too coarse for a density: see `bsi.methods.check_resolution`."""
        if not isinstance(self.kind, Standardize) or isinstance(self.kind, Latents) or not data.is_floating_point():
            return
        # The distance between neighboring numbers in the type of the data, and in the type that it is computed in.
        x, dtype = self.values(data), torch.finfo(data.dtype)
        coarse = dtype.eps * data.abs().amax(0, keepdim=True).double().clamp(min=dtype.smallest_normal)
        stored = (self.values(coarse) - self.values(torch.zeros_like(coarse))).max()
        check_resolution(self.method, max(float(stored), torch.finfo(x.dtype).eps * float(x.abs().max())))

    def warn_discrete(self, data: Tensor) -> None:
        """Warn if continuous data holds repeated or rounded values, and so has no density."""
        if isinstance(self.kind, Standardize) and not isinstance(self.kind, Latents) and data.is_floating_point():
            std = torch.as_tensor(self.kind.std, dtype=torch.float64, device=data.device)
            noise = last_noise(self.method) * std
            warn_discrete(data, noise if data.ndim == 2 else noise.max())

    # ---- Loss and predictions ----------------------------------------------------------------------------------------

    def forward(self, data: Tensor, cond: Condition | None = None, weight: Weight | None = None) -> PerSample:
        """The training loss 2 L_M / n of each sample, at levels stratified over the global batch."""
        self.check_denoiser()
        data = as_tensor(data)
        if data.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check(data)
        check_condition(cond, len(data))
        x = self.values(data)
        return training_loss(self.method, self.denoiser.given(cond), x, _levels(x), torch.randn_like(x), weight)

    def predict(
        self, latent: Data, level: float | Float[Tensor, "..."], cond: Condition | None = None, guidance: float = 1.0
    ) -> Data:
        """Predict x from a latent at a level of the method: E[x | latent] for a perfect network, as values.

        Args:
            latent: A point of a trajectory, such as `method.encoder(level).encode(x, eps)`.
            level: One level for all, or one for each; the precision of the belief for BSI and BFN, the SNR for VDM.
            cond: A condition with one row for each latent.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> x, eps = torch.zeros(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            >>> latent = model.method.encoder(torch.tensor(5.0)).encode(x, eps)
            >>> model.predict(latent, 5.0).shape
            torch.Size([2, 1, 8, 8])
        """
        check_condition(cond, len(latent))
        levels = torch.as_tensor(level, dtype=torch.float64, device=latent.device).expand(len(latent))
        with self.evaluating():
            return self.denoiser.given(cond, guidance)(latent, levels)

    def score(
        self, latent: Data, level: float | Float[Tensor, "..."], cond: Condition | None = None, guidance: float = 1.0
    ) -> Data:
        """The gradient of ln p(latent) at a level: (signal x_hat - latent) / noise^2. Arguments as in `predict`.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> model.score(torch.zeros(2, 1, 8, 8), 5.0).shape
            torch.Size([2, 1, 8, 8])
        """
        self.check_denoiser()
        x_hat = self.predict(latent, level, cond, guidance)
        encoder = self.method.encoder(torch.as_tensor(level, device=latent.device).expand(len(latent)))
        return (over(encoder.signal, latent) * x_hat - latent) / over(encoder.noise.square(), latent)

    # ---- Bounds and likelihoods --------------------------------------------------------------------------------------

    def elbo(
        self,
        data: Array | SampleSource,
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
        variance: Variance | str | None = None,
    ) -> Elbo:
        """The bound of each sample, by default with the paper's `measure` levels and `recon` reconstructions.

        For a model of latents, images (integers) have a bound through the autoencoder, see `bsi.latents`, and stored
        latents (floats) one of their own.

        The other arguments are those of `bsi.elbo.Estimator`. `proposal="fitted"` and `target_error` together reach a
        given error with the fewest evaluations. With `finite_k`, a `variance` or its kind makes the bound tighter: see
        `fit_variance`. The result prints with its errors; its `nats` has the bound of each sample.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> bound = model.elbo(bsi.data.open_dataset("digits").test[:64], progress=True)
            >>> print(f"{float(bound):.1f} bits/dim; of each sample, in nats: {bound.nats.shape}")
            1.8 bits/dim; of each sample, in nats: torch.Size([64])
        """
        if variance is not None and finite_k is None:
            raise UsageError("a variance belongs to finitely many steps: pass finite_k too, or leave variance out.")
        variance = self.variance(variance) if isinstance(variance, str) else variance
        estimator = Estimator(measure, recon, finite_k, proposal, control, target_error, seed, batch_size)
        with self.evaluating():
            return estimate(replace(self.on(data, cond), variance=variance), estimator, progress=progress)

    bits_per_dim = elbo  # an alias under the more common name

    def log_likelihood(
        self,
        data: Array,
        cond: Condition | None = None,
        *,
        probes: int | None = 1,
        draws: int = 1,
        tolerance: float | None = None,
        seed: int = 0,
        batch_size: int = 256,
        progress: bool = False,
    ) -> Float64[Tensor, " batch"]:
        """ln p of each sample under the probability flow, in nats and the units of the data: see `bsi.flow`.

        For binned data a lower bound on ln P(x), from draws of the position within each bin. The flow is another model
        than the one that `elbo` bounds: report the two separately.

        Args:
            probes: Random vectors for an unbiased estimate of each trace; None computes it exactly, with as many
                backward passes as a sample has dimensions.
            draws: Positions within the bins of each sample. The bound, ln of the mean of their weights, rises with
                their number. More than one needs `probes=None`: the noise of an estimated trace would raise it too.
            tolerance: Error of each step of the integration, in nats; by default 1e-4 for each dimension, from
                1e-2 to 0.5. A 32x32 image takes some 500 evaluations with their gradients, minutes on a CPU.

        Example:

            >>> model = bsi.Model.from_pretrained("digits")
            >>> images = bsi.data.open_dataset("digits").test[:4]
            >>> model.log_likelihood(images, tolerance=0.1).shape
            torch.Size([4])
        """
        self.check_denoiser()
        self.check_direct("the likelihood of the flow")
        if self.symbols is not None:
            raise UsageError("symbols have no density, so the flow has no likelihood of them. Use model.elbo(data).")
        if draws < 1 or (draws > 1 and (probes is not None or self.bins is None)):
            got = f"draws={draws}, probes={probes} and {self.kind!s:.80}"
            raise UsageError(f"draws must be at least 1, and more than 1 need binned data and probes=None, got {got}.")
        data = self._checked(as_tensor(data))
        self.warn_discrete(data)
        check_condition(cond, len(data))
        divergence = flow.exact_divergence if probes is None else flow.hutchinson(seed, self.shape, probes)
        tolerance = min(max(1e-2, 1e-4 * math.prod(self.shape)), 0.5) if tolerance is None else tolerance

        def log_weight(x: Data, predict: Predictor, ids: Rows, draw: int, advance: flow.Watch) -> PerSample:
            def watch(share: float) -> None:
                advance(share * len(x) / draws)

            if self.bins is None:
                return flow.flow_density(self.method, predict, x, divergence, ids, tolerance, watch).log_density
            eps = standard_normal(seed, ids, DEQUANTIZATION + draw, self.shape, torch.float64)
            position, index = torch.special.ndtr(eps).to(self.dtype), self.bins.indices(x)
            given = (self.method, predict, index, self.bins, position, divergence, ids, tolerance, watch)
            return flow.binned_flow(*given).log_density

        found = []
        with shown(progress, "log-likelihood", len(data), "sample") as advance, self.evaluating():
            for rows in torch.arange(len(data)).split(batch_size):
                x, predict, ids = (
                    self.values(_rows_of(data, rows, self.device)),
                    self._given(cond, rows),
                    rows.to(self.device),
                )
                each = torch.stack([log_weight(x, predict, ids, draw, advance) for draw in range(draws)])
                found.append(torch.logsumexp(each.double(), 0) - math.log(draws))
        return torch.cat(found).cpu() - math.prod(self.shape) * self.kind.log_determinant

    def fit_variance(self, data: Array, kind: str = "dct", seed: int = 0, batch_size: int = 256) -> Variance:
        """Fit the predictive variance of transitions, for `elbo`, `sample` and compression. It is kept under its kind.

        Args:
            data: Training samples; a few thousand are enough. Test samples would make the bound too good.
            kind: `level`, `pixels`, `dct`, `pca` or `learned`: see `bsi.variance.named_variance`.

        Example:

            >>> model, digits = bsi.Model.from_pretrained("digits"), bsi.data.open_dataset("digits")
            >>> variance = model.fit_variance(digits.train[:256], "level")
            >>> bound = model.elbo(digits.test[:64], finite_k=16, variance=variance)
            >>> samples = model.sample(4, steps=8, variance="level")
        """
        self.check_denoiser()
        if self.symbols is not None:
            raise UsageError("a variance is for numbers; the transitions of symbols are mixtures. Leave variance out.")
        self.check(data)
        x = self.values(data).to(self.device)
        with self.evaluating():
            self.variances[kind] = named_variance(kind, self.method, self.denoiser, x, seed, batch_size, self.kind)
        return self.variances[kind]

    def variance(self, kind: str) -> Variance | None:
        """The predictive variance of this kind, which `fit_variance` fitted; None if the kind is `none`."""
        if kind not in (*self.variances, "none"):
            raise UsageError(f"the variance {kind!r} is not fitted. Call model.fit_variance(train, {kind!r}) first.")
        return self.variances.get(kind)

    def on(
        self, data: Array | SampleSource, cond: Condition | None = None, ids: Sequence[int] | np.ndarray | None = None
    ) -> EvaluatedModel:
        """The argument of `bsi.bound.estimate`: this model, in evaluation mode, on samples, by default on all."""
        self.check_denoiser()
        check_condition(cond, len(data))
        if isinstance(data, Tensor | np.ndarray) or not isinstance(data, SampleSource):  # arrays have its methods too
            data = self._checked(as_tensor(data))
            self.warn_discrete(data)
        chosen = torch.arange(len(data)) if ids is None else torch.as_tensor(ids)
        if len(chosen) < 1:
            raise UsageError("a bound needs at least one sample, got none")
        if not isinstance(data, Tensor) and isinstance(self.kind, Standardize):
            self.warn_discrete(data.take(searched(chosen, math.prod(self.shape)).numpy()))

        def take(places: Rows) -> Tensor:
            rows = chosen[places.cpu()]
            if isinstance(data, Tensor):
                return _rows_of(data, rows, self.device)
            batch = data.take(rows.numpy())
            self.check(batch)
            self.check_resolution(batch)
            return batch.to(self.device)

        encoded = None
        if isinstance(self.kind, Latents) and self.autoencoder is not None:
            encoded = Encoded(self.kind, self.autoencoder, take)

        def x(places: Rows) -> Data:
            if encoded is None:
                return self.values(take(places))
            eps = noise(0, places, "latent", 0, self.latent_shape, torch.float32)
            return self.kind.values(encoded.latents(places, eps), self.dtype)

        def predict(places: Rows) -> Predictor:
            return self._given(cond, chosen[places.cpu()])

        images = encoded is not None and not take(torch.zeros(1, dtype=torch.int64)).is_floating_point()
        return EvaluatedModel(
            self.method, predict, x, len(chosen), self.latent_shape, self.kind, self.device,
            encoded=encoded if images else None,
        )  # fmt: skip

    def _checked(self, data: Tensor) -> Tensor:
        self.check(data)
        self.check_resolution(data)
        return data

    def _given(self, cond: Condition | None, rows: Rows, guidance: float = 1.0, known: Data | None = None) -> Predictor:
        """The predictor for these rows of a condition."""
        if isinstance(cond, dict):
            cond = {name: _rows_of(value, rows, self.device) for name, value in cond.items()}
        elif cond is not None:
            cond = _rows_of(cond, rows, self.device)
        return self.denoiser.given(cond, guidance, known)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into evaluation mode for a `with` block."""
        was_training = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(was_training)


def _rows_of(tensor: Tensor, rows: Rows, device: torch.device) -> Tensor:
    return tensor[rows.to(tensor.device)].to(device)


def _levels(x: Data) -> PerSample:
    """t for this rank's part of the global batch, with the same delta on all ranks."""
    delta = torch.rand((), dtype=torch.float64, device=x.device)
    if not (dist.is_available() and dist.is_initialized()):
        return low_discrepancy(len(x), delta)
    dist.broadcast(delta, src=0)
    rank, world = dist.get_rank(), dist.get_world_size()
    return low_discrepancy(world * len(x), delta)[rank * len(x) : (rank + 1) * len(x)]
