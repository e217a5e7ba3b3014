"""Lossless compression with bits-back coding: a file whose size is the bound.

With the k steps of a grid, a sample x is coded together with a chain of latents. In information coordinates, the
posterior runs backwards from the last latent,

    q(s_k | x)          = N(alpha_k x, Lambda_k),
    q(s_{i-1} | s_i, x) = N(alpha_{i-1} x + (Lambda_{i-1} / Lambda_i) (s_i - alpha_i x),
                            Lambda_{i-1} (Lambda_i - Lambda_{i-1}) / Lambda_i),

and the model forwards from the prior, p(s_i | s_{i-1}) = N(s_{i-1} + D x_hat, D + D^2 v) (variance.py), p(x | s_k). To
encode a sample, s_k, ..., s_0 are decoded ("popped") from the bits that are already there, by q; then x, s_k, ..., s_0
are encoded ("pushed"), by p. The expected net length is the bound L_M^k + L_R + L_prior. Decoding reverses each step.

Latents lie on grids whose spacing is a fraction of q's standard deviation. Discretizing both q and p never raises their
divergence. The first bits come from samples that are stored uncompressed, log2(bins) bits for each dimension, until the
stack holds enough bits for a batch. The stack of bits is an entropy coder of the package constriction (asymmetric
numeral systems).

Encoder and decoder must compute the same x_hat to the last bit (coded_file.py): a file can be decoded only on machines
of the same type, so the format is not suitable for archives.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, Integer
from torch import Tensor

from bsi import coded_file
from bsi.errors import BsiError, DataError, UsageError, extra
from bsi.grids import paper_grid
from bsi.model import Model
from bsi.rng import standard_normal
from bsi.solvers import Path
from bsi.values import Bins
from bsi.variance import Variance, basis_of

SPACING = 1.25  # of the latents' grids, in standard deviations of q or p, whichever is smaller
# Grid points on either side of the mean with nonzero probability (at least 2^-24): REACH for q, LEAST to MOST for p.
REACH, LEAST, MOST = 12, 64, 1 << 12
MARGIN = 1.1  # a batch starts only if the stack holds this multiple of the bits that it is expected to take
PROBES = 4  # predictions whose hash a decoder compares before it starts

Report = Callable[[int], None]
Preview = Callable[[int, Tensor], None]
Coordinates = Float64[np.ndarray, "batch n"]
Places = Int64[np.ndarray, "batch n"]


class CodedBatch(NamedTuple):
    """The size of a batch, and by how many bits it made the file larger."""

    samples: int
    bits: int


@dataclass(frozen=True)
class Compressed:
    """A compressed data set and its size. The first `plain` samples, of `initial_bits`, are stored uncompressed."""

    blob: bytes
    samples: int
    plain: int
    n: int
    initial_bits: int
    batches: tuple[CodedBatch, ...]

    @property
    def gross_bits_per_dim(self) -> float:
        """Bits per dimension of the whole file."""
        return 8 * len(self.blob) / (self.samples * self.n)

    @property
    def net_bits_per_dim(self) -> float:
        """Bits per dimension of the samples coded with the model: the cost of each additional sample."""
        coded = self.samples - self.plain
        return sum(batch.bits for batch in self.batches) / (coded * self.n) if coded else math.nan


def compress(
    model: Model,
    data: Tensor,
    steps: int = 64,
    variance: Variance | None = None,
    batch_size: int = 16,
    progress: Report = lambda count: None,
) -> Compressed:
    """Compress binned data without loss.

    Args:
        model: A model with `bins`, on the device that computes; decoding needs the same model.
        data: Bin indices.
        steps: Steps of the chain. More steps make a tighter bound and need more initial bits.
        variance: Variance of the transitions (`bsi.variance.named_variance`): `level`, `pixels` or `dct`.
        batch_size: Samples coded together, at most: fewer while the stack holds too few bits for their latents.
        progress: Called with the number of network evaluations that were just completed.
    """
    model.check_denoiser()
    bins = _bins(model)
    if data.is_floating_point() or tuple(data.shape[1:]) != model.shape:
        got = f"{data.dtype} of shape {tuple(data.shape)}"
        raise UsageError(f"compression takes bin indices of samples of shape {model.shape}, got {got}.")
    if steps < 1 or batch_size < 1:
        raise UsageError(f"steps and batch_size must be at least 1, got steps={steps} and batch_size={batch_size}.")
    model.check(data)
    stored = None if variance is None else coded_file.stored_variance(variance)
    chain = _Chain(model, bins, steps, stored, progress)
    index = data.cpu().numpy().astype(np.int32).reshape(len(data), -1)

    coder, batches, plain = _stream().stack.AnsCoder(), list[CodedBatch](), 0
    per_sample = chain.initial_bits * MARGIN
    while plain < len(index) and coder.num_valid_bits() < per_sample:
        coder.encode_reverse(index[plain], _stream().model.Uniform(bins.count))
        plain += 1
    initial = before = coder.num_valid_bits()
    done, checks = plain, [coded_file.checksum(index[:plain])]
    while done < len(index):
        part = index[done : done + min(batch_size, max(1, int(before / per_sample)))]
        chain.encode(coder, part)
        checks.append(coded_file.checksum(part))
        after = coder.num_valid_bits()
        batches.append(CodedBatch(len(part), after - before))
        done, before = done + len(part), after
    header = coded_file.Header(
        shape=list(model.shape),
        bins=[bins.low, bins.high, bins.count],
        count=len(index),
        plain=plain,
        sizes=[batch.samples for batch in batches],
        checks=checks,
        steps=steps,
        variance=stored,
        model=coded_file.model_hash(model),
        machine=coded_file.machine(model),
        probe=chain.probe(),
        sha256=coded_file.data_hash(index, bins),
    )
    words = coder.get_compressed().astype("<u4").tobytes()
    return Compressed(coded_file.pack(header, words), len(index), plain, chain.n, initial, tuple(batches))


def decompress(
    model: Model,
    blob: bytes,
    progress: Report = lambda count: None,
    preview: Preview = lambda step, x_hat: None,
) -> Integer[Tensor, "samples *data"]:
    """Decompress a file. The data is identical to that which was compressed.

    Args:
        model: The model that compressed it.
        preview: Called with the step and the prediction x_hat of each batch, from coarse to fine.

    Raises:
        DataError: The file is damaged.
        UsageError: The file was compressed with another model, or predictions on this machine differ.
    """
    header, words = coded_file.unpack(blob)
    bins = _bins(model)
    header.check(model, bins, 8 * len(words))
    with _threads(header.machine.get("threads")):
        chain = _Chain(model, bins, header.steps, header.variance, progress, preview)
        if max(header.sizes, default=0) * chain.initial_bits > 8 * len(words):
            raise DataError("the header of the compressed file claims batches that are larger than the file.")
        header.check_predictions(model, chain.probe())
        coder, parts = _stream().stack.AnsCoder(np.frombuffer(words, dtype="<u4").astype(np.uint32)), []
        for count, check in zip(reversed(header.sizes), reversed(header.checks[1:]), strict=True):
            parts.append(chain.decode(coder, count))
            if coded_file.checksum(parts[-1]) != check:
                raise BsiError(
                    "a batch was decoded to other values than those that were encoded, because this machine computes "
                    "other predictions than the one that wrote the file. Decode it there; nothing was written."
                )
    parts += [coder.decode(_stream().model.Uniform(bins.count), chain.n)[None] for _ in range(header.plain)]
    index = np.concatenate([np.zeros((0, chain.n), np.int32), *parts[::-1]])
    if coded_file.data_hash(index, bins) != header.sha256:
        raise DataError("the decoded data has another SHA-256 than the file records: the file is damaged.")
    return torch.from_numpy(index.astype(np.uint8 if bins.count <= 256 else np.int32)).reshape(-1, *model.shape)


def evaluations(blob: bytes) -> int:
    """The number of network evaluations that decompression takes, counted for each sample."""
    header, _ = coded_file.unpack(blob)
    return (header.steps + 1) * (header.count - header.plain)


class _Chain:
    """The chain of latents of a model. `places` are the latents s_0 ... s_k of a batch, as numbers of grid points."""

    def __init__(
        self,
        model: Model,
        bins: Bins,
        steps: int,
        stored: dict[str, Any] | None,
        progress: Report,
        preview: Preview = lambda step, x_hat: None,
    ) -> None:
        self.model, self.bins, self.last, self.progress, self.preview = model, bins, steps, progress, preview
        method, variance = model.method, coded_file.read_variance(stored, model)
        self.levels = paper_grid(method, steps)
        path = Path.of(method, self.levels)
        self.scale, self.information = path.scale.numpy(), path.information.numpy()
        self.alpha = method.gain(self.levels).numpy()
        self.basis = basis_of("pixels", model.shape)[0] if variance is None else variance.basis
        self.n = math.prod(model.shape)
        self.variance = None if variance is None else variance.of_level(self.levels[:-1]).numpy()
        gained = np.diff(self.information, prepend=-math.inf)  # no step leads to the prior
        # standard deviations of q(s_i | s_{i+1}, x), and of q(s_k | x) as the case Lambda_{k+1} = inf
        self.std = np.sqrt(self.information * (1 - self.information / np.append(self.information[1:], math.inf)))
        self.spacing = SPACING * np.minimum(self.std, np.sqrt(gained))
        # p must be able to code any draw of q, even if the prediction is wrong by the whole range of the data.
        wrong = (bins.high - bins.low) * gained[1:] / self.spacing[1:]
        self.reach = [LEAST, *np.minimum(MOST, LEAST + np.floor(wrong)).astype(int).tolist()]
        self.coded = range(0 if self.std[0] > 0 else 1, steps + 1)  # BFN's first latent is 0, and needs no code

    @property
    def initial_bits(self) -> float:
        """The expected number of bits that the latents of one sample take from the stack."""
        entropy = 0.5 * math.log2(2 * math.pi * math.e)
        return self.n * sum(math.log2(self.std[i] / self.spacing[i]) + entropy for i in self.coded)

    def encode(self, coder: Any, index: Integer[np.ndarray, "batch n"]) -> None:
        """Push a batch of samples."""
        x, places = self._coordinates(index), np.zeros((len(self.levels), *index.shape), np.int64)
        for i in reversed(self.coded):
            places[i] = self._posterior(i, x, places).pop(coder)
        coder.encode_reverse(index.reshape(-1), *self._decoder(places))
        for i in reversed(self.coded):
            self._transition(i, places).push(coder, places[i])

    def decode(self, coder: Any, count: int) -> Integer[np.ndarray, "batch n"]:
        """Pop a batch of samples, and push back the bits that encoding them popped."""
        places = np.zeros((len(self.levels), count, self.n), np.int64)
        for i in self.coded:
            places[i] = self._transition(i, places).pop(coder)
        index = coder.decode(*self._decoder(places)).reshape(count, self.n)
        x = self._coordinates(index)
        for i in self.coded:
            self._posterior(i, x, places).push(coder, places[i])
        return index

    def probe(self) -> str:
        """A hash of predictions for fixed latents at some levels."""
        sha = hashlib.sha256()
        for i in np.linspace(0, self.last, PROBES).astype(int).tolist():
            eps = standard_normal(0, torch.arange(2), i, (self.n,), torch.float64).numpy()
            sha.update(self._x_hat(i, eps * math.sqrt(self.information[i])).numpy().tobytes())
        return sha.hexdigest()

    def _coordinates(self, index: Integer[np.ndarray, "batch n"]) -> Coordinates:
        values = torch.from_numpy(self.bins.values(index)).reshape(-1, *self.model.shape)
        return self.basis.coordinates(values).numpy()

    def _posterior(self, i: int, x: Coordinates, places: np.ndarray) -> _GridNormal:
        """q(s_i | s_{i+1}, x), or q(s_k | x)."""
        mean = self.alpha[i] * x
        if i < self.last:
            following = places[i + 1] * self.spacing[i + 1]
            mean = mean + self.information[i] / self.information[i + 1] * (following - self.alpha[i + 1] * x)
        return _GridNormal(mean, self.std[i], self.spacing[i], REACH)

    def _transition(self, i: int, places: np.ndarray) -> _GridNormal:
        """p(s_i | s_{i-1}), or the prior of s_0 in information coordinates."""
        if i == 0:
            mean = np.zeros(places[0].shape)
            std = np.asarray(float(self.model.method.prior(torch.ones(1, 1, dtype=torch.float64))) * self.scale[0])
        else:
            gained = self.information[i] - self.information[i - 1]
            x_hat = self.basis.coordinates(self._predict(i - 1, places)).numpy()
            mean = places[i - 1] * self.spacing[i - 1] + gained * x_hat
            std = np.sqrt(gained + (0.0 if self.variance is None else gained**2 * self.variance[i - 1]))
        return _GridNormal(mean, std, self.spacing[i], self.reach[i])

    def _decoder(self, places: np.ndarray) -> tuple[Any, Float64[np.ndarray, " m"], Float64[np.ndarray, " m"]]:
        """p(x | s_k), a Normal over the bins: its mean and standard deviation are in units of their width."""
        x_hat = self._predict(self.last, places)
        place = ((x_hat - self.bins.low) / self.bins.width).reshape(-1).numpy()
        std = 1 / (math.sqrt(self.model.method.recon_precision) * self.bins.width)
        return _stream().model.QuantizedGaussian(0, self.bins.count - 1), place, np.full_like(place, std)

    def _predict(self, i: int, places: np.ndarray) -> Tensor:
        """x_hat at s_i."""
        x_hat = self._x_hat(i, places[i] * self.spacing[i])
        self.progress(len(x_hat))
        self.preview(i, x_hat)
        return x_hat

    @torch.no_grad()
    def _x_hat(self, i: int, latent: Coordinates) -> Tensor:
        """x_hat at level i, clipped to the data's range; at the last level, the result of `method.decode`."""
        method, device = self.model.method, self.model.device
        values = self.basis.values(torch.from_numpy(latent), torch.empty(len(latent), *self.model.shape))
        psi = (values / self.scale[i] if self.scale[i] else torch.zeros_like(values)).float()
        psi, level, predict = psi.to(device), self.levels[i].expand(len(psi)).to(device), self.model.denoiser
        x_hat = method.decode(psi, level, predict) if i == self.last else predict(psi, level)
        return torch.nan_to_num(x_hat.cpu().double()).clamp(self.bins.low, self.bins.high)


class _GridNormal:
    """A Normal on the multiples of `spacing`: its rounded mean, and the rest of it and its deviation in grid points."""

    def __init__(self, mean: Coordinates, std: np.ndarray | float, spacing: float, reach: int) -> None:
        self.center = np.rint(mean / spacing)
        self.rest = (mean / spacing - self.center).reshape(-1)
        std = np.sqrt(np.square(std / spacing) - 1 / 12)  # rounding adds 1/12
        self.std = np.ascontiguousarray(np.broadcast_to(std, mean.shape)).reshape(-1)
        self.reach, self.normal = reach, _stream().model.QuantizedGaussian(-reach, reach)

    def pop(self, coder: Any) -> Places:
        offset = coder.decode(self.normal, self.rest, self.std).reshape(self.center.shape)
        return self.center.astype(np.int64) + offset

    def push(self, coder: Any, place: Places) -> None:
        offset = place - self.center.astype(np.int64)
        if np.abs(offset).max(initial=0) > self.reach:
            raise UsageError("a latent lies too far from its prediction to be coded. Use more steps, or train longer.")
        coder.encode_reverse(offset.astype(np.int32).reshape(-1), self.normal, self.rest, self.std)


def _stream() -> Any:
    """The entropy coder's stack of bits, and the distributions of its symbols."""
    with extra("codec", "compression"):
        import constriction
    return constriction.stream


@contextmanager
def _threads(count: object) -> Iterator[None]:
    """Set the encoder's number of threads, and restore the previous one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count if isinstance(count, int) and 1 <= count <= 1024 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bins(model: Model) -> Bins:
    if model.bins is None:
        raise UsageError("only binned data has a finite number of bits. Pass a model with bins.")
    return model.bins
