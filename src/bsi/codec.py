"""Lossless compression with bits-back coding: a file whose size is the bound.

With the k steps of a grid, a sample x is coded together with a chain of latents. In information coordinates, and with
a_i = alpha_i - alpha_0, the posterior is a first latent, a last one, and a Brownian bridge between the two, which does
not depend on x:

    q(s_0 | x)            = N(alpha_0 x, Lambda_0),
    q(s_k | s_0, x)       = N(s_0 + a_k x, a_k),
    q(s_{i-1} | s_i, s_0) = N(s_0 + (a_{i-1} / a_i) (s_i - s_0), a_{i-1} (a_i - a_{i-1}) / a_i).

The model runs forwards from the prior, p(s_i | s_{i-1}) = N(s_{i-1} + D x_hat, D + D^2 v) (variance.py), p(x | s_k). To
encode a sample, s_0 and s_k are decoded ("popped") from the bits that are already there, by q, and x is encoded
("pushed"), by p. Then for i = k .. 1 s_{i-1} is popped by q and s_i is pushed by p, and at last s_0 is pushed by the
prior. The expected net length is the bound L_M^k + L_R + L_prior. Decoding reverses each step. Since pops and pushes
alternate (Bit-Swap: Kingma et al., 2019), the stack must hold the bits of three latents, not of k + 1.

Latents lie on grids whose spacing is a fraction of q's standard deviation. Discretizing both q and p never raises their
divergence. The first bits come from samples that are stored uncompressed, log2(bins) bits for each dimension, until the
stack holds enough bits for a sample; batches grow with the stack. The stack of bits is an entropy coder of the package
constriction (asymmetric numeral systems). codec_file.py has the file.
"""

from __future__ import annotations

import functools
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

from bsi.codec_file import (
    Header,
    checksum,
    data_hash,
    machine,
    model_hash,
    pack,
    read_variance,
    stored_variance,
    unpack,
)
from bsi.errors import BsiError, DataError, UsageError, extra
from bsi.grids import paper_grid
from bsi.model import Model
from bsi.rng import standard_normal
from bsi.solvers import Path
from bsi.values import Bins
from bsi.variance import Variance, basis_of, mass_beyond

SPACING = 1.25  # of the latents' grids, in standard deviations of q or p, whichever is smaller
RESTS = 128  # values of the rest of a mean
NARROWEST, WIDEST, WIDTH_STEP = 0.02, 1e6, 0.01  # of standard deviations; the step is in the logarithm
LONGEST = 1 << 9  # a longer table is computed as it is needed
FURTHEST = 1 << 20  # the distance from the end of a table to the last integer that can be coded
# A batch starts only if the stack holds this multiple of the bits that it is expected to take, and these bits more.
MARGIN, RESERVE = 1.1, 64
PROBES = 4  # predictions whose hash a decoder compares before it starts

Watch = Callable[[int, Tensor], None]  # is called with each step and its predictions
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
    batch_size: int = 256,
    watch: Watch = lambda step, x_hat: None,
) -> Compressed:
    """Compress binned data without loss.

    Args:
        model: A model with `bins`, on the device that computes; decoding needs the same model.
        data: Bin indices.
        steps: Steps of the chain. More steps make a tighter bound and take longer.
        variance: Variance of the transitions (`Model.fit_variance`): `level`, `pixels`, `dct` or `learned`.
        batch_size: Samples coded together, at most. Batches grow with the number of bits on the stack.
        watch: Called with the step of the chain and the predictions x_hat of a batch, after each evaluation.
    """
    model.check_denoiser()
    bins, stack = check_indices(model, data), _stream().stack.AnsCoder()
    if steps < 1 or batch_size < 1:
        raise UsageError(f"steps and batch_size must be at least 1, got steps={steps} and batch_size={batch_size}.")
    stored = None if variance is None else stored_variance(variance)
    chain = _Chain(model, bins, steps, stored, watch)
    index = data.cpu().numpy().astype(np.int32).reshape(len(data), -1)

    batches, plain, per_sample = list[CodedBatch](), 0, chain.held_bits * MARGIN
    while plain < len(index) and stack.num_valid_bits() < per_sample + RESERVE:
        stack.encode_reverse(index[plain], _stream().model.Uniform(bins.count))
        plain += 1
    initial = before = stack.num_valid_bits()
    done, checks = plain, [checksum(index[:plain])]
    while done < len(index):
        part = index[done : done + min(batch_size, max(1, int((before - RESERVE) / per_sample)))]
        chain.encode(stack, part)
        checks.append(checksum(part))
        done, after = done + len(part), stack.num_valid_bits()
        batches.append(CodedBatch(len(part), after - before))
        before = after
    header = Header(
        count=len(index),
        plain=plain,
        sizes=[batch.samples for batch in batches],
        checks=checks,
        steps=steps,
        variance=stored,
        model=model_hash(model),
        machine=machine(model),
        probe=chain.probe(),
        sha256=data_hash(index, bins),
    )
    words = stack.get_compressed().astype("<u4").tobytes()
    return Compressed(pack(header, words), len(index), plain, chain.n, initial, tuple(batches))


def check_indices(model: Model, data: Tensor) -> Bins:
    """The bins of a model. Raises if the data is not indices of them in samples of the model's shape."""
    bins = _bins(model)
    if data.is_floating_point() or tuple(data.shape[1:]) != model.shape:
        got = f"{data.dtype} of shape {tuple(data.shape)}"
        raise UsageError(f"compression takes bin indices of samples of shape {model.shape}, got {got}.")
    model.check(data)
    return bins


def decompress(model: Model, blob: bytes, watch: Watch = lambda step, x_hat: None) -> Integer[Tensor, "samples *data"]:
    """Decompress a file with the model that compressed it. The data is identical; `watch` is as in `compress`.

    Raises:
        DataError: The file is damaged.
        UsageError: The file was compressed with another model, or predictions on this machine differ.
    """
    header, words = unpack(blob)
    bins = _bins(model)
    header.check(model, bins, 8 * len(words))
    with _threads(header.machine.get("threads")):
        chain = _Chain(model, bins, header.steps, header.variance, watch)
        if max(header.sizes, default=0) * chain.held_bits > 8 * len(words):
            raise DataError("the header of the compressed file claims batches that are larger than the file.")
        header.check_predictions(model, chain.probe())
        try:
            stack, parts = _stream().stack.AnsCoder(np.frombuffer(words, dtype="<u4").astype(np.uint32)), []
        except ValueError as error:
            raise DataError(f"the compressed file is damaged: {error}") from error
        for count, check in zip(reversed(header.sizes), reversed(header.checks[1:]), strict=True):
            try:
                parts.append(chain.decode(stack, count))
            except UsageError as error:  # latents that the encoder would have rejected
                raise DataError("the compressed file is damaged: its latents are impossible.") from error
            if checksum(parts[-1]) != check:
                raise BsiError(
                    "a batch was decoded to other values than those that were encoded, because this machine computes "
                    "other predictions than the one that wrote the file. Decode it there; nothing was written."
                )
    parts += [stack.decode(_stream().model.Uniform(bins.count), chain.n)[None] for _ in range(header.plain)]
    index = np.concatenate([np.zeros((0, chain.n), np.int32), *parts[::-1]])
    if data_hash(index, bins) != header.sha256:
        raise DataError("the decoded data has another SHA-256 than the file records: the file is damaged.")
    return torch.from_numpy(index.astype(np.uint8 if bins.count <= 256 else np.int32)).reshape(-1, *model.shape)


def evaluations(blob: bytes) -> int:
    """The number of network evaluations that decompression takes, counted for each sample."""
    header, _ = unpack(blob)
    return (header.steps + 1) * (header.count - header.plain)


class _Chain:
    """The chain of latents of a model. `places` are latents of a batch, as numbers of grid points."""

    def __init__(self, model: Model, bins: Bins, steps: int, stored: dict[str, Any] | None, watch: Watch) -> None:
        self.model, self.bins, self.last, self.watch = model, bins, steps, watch
        method, variance = model.method, read_variance(stored, model)
        self.levels = paper_grid(method, steps) if variance is None else variance.grid(steps)
        path = Path.of(method, self.levels)
        self.scale, self.information = path.scale.numpy(), path.information.numpy()
        self.alpha = method.gain(self.levels).numpy()
        self.basis = basis_of("pixels", model.shape) if variance is None else variance.basis
        self.n = math.prod(model.shape)
        self.variance = variance
        self.sharpness = None if variance is None else float(variance.decoder_at(self.levels[-1:])[1])
        self.gained = np.diff(self.alpha)
        # standard deviations of q(s_i | s_{i+1}, s_0), of q(s_k | s_0, x) as the case a_{k+1} = inf, and of q(s_0 | x)
        known = self.known = self.alpha - self.alpha[0]
        self.std = np.sqrt(known * (1 - known / np.append(known[1:], math.inf)))
        self.std[0] = math.sqrt(self.information[0])
        narrower = np.minimum(self.std, np.sqrt(np.append(math.inf, self.gained)))
        self.spacing = np.where(narrower > 0, SPACING * narrower, 1.0)  # BFN's first latent is 0

    @property
    def held_bits(self) -> float:
        """The expected number of bits that a sample takes from the stack before it gives the first ones back."""
        entropy = 0.5 * math.log2(2 * math.pi * math.e)
        bits = np.log2(np.maximum(self.std / self.spacing, 2**-entropy)) + entropy
        return self.n * float(bits[0] + (bits[1:] + np.append(0.0, bits[1:-1])).max())

    def encode(self, stack: Any, index: Integer[np.ndarray, "batch n"]) -> None:
        """Push a batch of samples."""
        x = self._coordinates(index)
        first = self._start(x).pop(stack)
        latent = self._end(x, first).pop(stack)
        self._decoder(latent).push(stack, index.astype(np.int64))
        for i in range(self.last - 1, -1, -1):
            earlier = self._bridge(i, first, latent).pop(stack) if i else first
            self._transition(i, earlier).push(stack, latent)
            latent = earlier
        self._prior(len(x)).push(stack, first)

    def decode(self, stack: Any, count: int) -> Integer[np.ndarray, "batch n"]:
        """Pop a batch of samples, and push back the bits that encoding them popped."""
        first = latent = self._prior(count).pop(stack)
        for i in range(self.last):
            later = self._transition(i, latent).pop(stack)
            if i:
                self._bridge(i, first, later).push(stack, latent)
            latent = later
        index = self._decoder(latent).pop(stack)
        x = self._coordinates(index)
        self._end(x, first).push(stack, latent)
        self._start(x).push(stack, first)
        return index

    def probe(self) -> str:
        """A hash of predictions and decoders for fixed latents at some levels."""
        sha = hashlib.sha256()
        for i in np.linspace(0, self.last, PROBES).astype(int).tolist():
            eps = standard_normal(0, torch.arange(2), i, (self.n,), torch.float64).numpy()
            for found in self._predict(i, eps * math.sqrt(self.information[i])):
                sha.update(found.cpu().numpy().tobytes())
        return sha.hexdigest()

    def _coordinates(self, index: Integer[np.ndarray, "batch n"]) -> Coordinates:
        values = torch.from_numpy(self.bins.values(index)).reshape(-1, *self.model.shape)
        return self.basis.coordinates(values).numpy()

    def _start(self, x: Coordinates) -> _Rounded:
        """q(s_0 | x)."""
        return _latents(self.alpha[0] * x, self.std[0], self.spacing[0])

    def _end(self, x: Coordinates, first: Places) -> _Rounded:
        """q(s_k | s_0, x)."""
        mean = first * self.spacing[0] + self.known[-1] * x
        return _latents(mean, self.std[-1], self.spacing[-1])

    def _bridge(self, i: int, first: Places, later: Places) -> _Rounded:
        """q(s_i | s_{i+1}, s_0)."""
        share, start = self.known[i] / self.known[i + 1], first * self.spacing[0]
        mean = start + share * (later * self.spacing[i + 1] - start)
        return _latents(mean, self.std[i], self.spacing[i])

    def _prior(self, count: int) -> _Rounded:
        """p(s_0)."""
        std = float(self.model.method.prior(torch.ones(1, 1, dtype=torch.float64))) * self.scale[0]
        return _latents(np.zeros((count, self.n)), std, self.spacing[0], tails=True)

    def _transition(self, i: int, place: Places) -> _Rounded:
        """p(s_{i+1} | s_i)."""
        latent, gained = place * self.spacing[i], self.gained[i]
        x_hat, v = self._watched(i, latent)
        mean = latent + gained * self.basis.coordinates(x_hat).cpu().numpy()
        return _latents(mean, np.sqrt(gained + gained**2 * v.cpu().numpy()), self.spacing[i + 1], tails=True)

    def _decoder(self, place: Places) -> _Rounded:
        """p(x | s_k), in units of the bins' width."""
        x_hat, v = self._watched(self.last, place * self.spacing[-1])
        mean = ((x_hat - self.bins.low) / self.bins.width).flatten(1).cpu().numpy()
        std = np.sqrt(v.cpu().numpy())
        return _Rounded(mean, std, tails=True, bins=self.bins.count, sharpness=self.sharpness)

    def _watched(self, i: int, latent: Coordinates) -> tuple[Tensor, Tensor]:
        x_hat, v = self._predict(i, latent)
        self.watch(i, x_hat)
        return x_hat, v

    @torch.no_grad()
    def _predict(self, i: int, latent: Coordinates) -> tuple[Tensor, Tensor]:
        """x_hat at level i, clipped to the data's range, and the variance of its coordinates.

        At the last level the variance is the decoder's, for each value in units of the bins' width.

        Without a variance the last prediction is the result of `method.decode`.
        """
        method, device = self.model.method, self.model.device
        values = self.basis.values(torch.from_numpy(latent).to(device), torch.empty(len(latent), *self.model.shape))
        psi = (values / self.scale[i] if self.scale[i] else torch.zeros_like(values)).float()
        level, predict = self.levels[i].expand(len(psi)).to(device), self.model.denoiser
        decodes = i == self.last and self.variance is None
        x_hat = method.decode(psi, level, predict) if decodes else predict(psi, level)
        x_hat = torch.nan_to_num(x_hat).clamp(self.bins.low, self.bins.high)
        if self.variance is None:
            last = 1 / (method.recon_precision * self.bins.width**2)
            v = torch.full((len(x_hat), self.n), last if i == self.last else 0.0, dtype=torch.float64, device=device)
        elif i == self.last:
            v = self.variance.decoder(self.bins, level, psi, x_hat)[1].square().flatten(1)
        else:
            v = self.variance.at(level, psi, x_hat)
        return x_hat.double(), v


class _Rounded:
    """Integers that are Normal before they are rounded, as a rounded mean and an offset from it.

    The rest of the mean and the standard deviation are rounded to few values, so that many integers share their
    distribution and are coded by one call with one table. If an offset may lie in the `tails`, beyond the table, the
    table's ends stand for it, and the distance from them is coded uniformly. With `bins`, the first and the last of
    them are the ends of the tables; with a `sharpness`, the distribution is that of `variance.mass_beyond`.
    """

    def __init__(
        self, mean: Coordinates, std: Coordinates, tails: bool, bins: int | None = None, sharpness: float | None = None
    ) -> None:
        self.center, self.tails = np.rint(mean), tails
        rest = np.rint((mean - self.center) * RESTS).reshape(-1)
        width = np.rint(np.log(np.clip(std, NARROWEST, WIDEST) / NARROWEST) / WIDTH_STEP).reshape(-1)
        self.last = 4 + np.ceil(6 * _std(width)).astype(np.int64)
        self.below, above, shared = self.last, self.last, (width * (RESTS + 1) + rest + RESTS // 2).astype(np.int64)
        if bins is not None:
            center, size = self.center.astype(np.int64).reshape(-1), self.last.max(initial=0) + 1
            self.below, above = np.minimum(self.last, center), np.minimum(self.last, bins - 1 - center)
            shared = (shared * size + self.below) * size + above
        first = shared.min()
        # NumPy sorts 16 bits in linear time.
        self.order = np.argsort((shared - first).astype(np.min_scalar_type(shared.max() - first)), kind="stable")
        starts = np.append(0, np.flatnonzero(np.diff(shared[self.order])) + 1)
        self.counts = np.diff(np.append(starts, len(shared))).tolist()
        columns = (each[self.order[starts]].astype(int).tolist() for each in (width, rest, self.below, above))
        self.tables = [_table(*each, sharpness) for each in zip(*columns, strict=True)]

    def pop(self, stack: Any) -> Places:
        found = [stack.decode(table, count) for table, count in zip(self.tables, self.counts, strict=True)]
        offset = np.empty(len(self.order), np.int64)
        offset[self.order] = np.concatenate(found)
        offset -= self.below
        if self.tails and len(beyond := np.flatnonzero(np.abs(offset) == self.last)):
            further = stack.decode(_stream().model.Uniform(FURTHEST), len(beyond))
            offset[beyond] += np.sign(offset[beyond]) * further
        return self.center.astype(np.int64) + offset.reshape(self.center.shape)

    def push(self, stack: Any, place: Places) -> None:
        offset = (place - self.center.astype(np.int64)).reshape(-1)
        further = np.abs(offset) - self.last
        if further.max(initial=0) >= (FURTHEST if self.tails else 1):
            raise UsageError("a latent lies too far from its prediction to be coded. Use more steps, or train longer.")
        if self.tails and len(beyond := np.flatnonzero(further >= 0)):
            stack.encode_reverse(further[beyond].astype(np.int32), _stream().model.Uniform(FURTHEST))
        symbols = (np.clip(offset, -self.last, self.last) + self.below)[self.order].astype(np.int32)
        stop = len(symbols)
        for table, count in zip(reversed(self.tables), reversed(self.counts), strict=True):
            stack.encode_reverse(symbols[stop - count : stop], table)
            stop -= count


def _latents(mean: Coordinates, std: Coordinates | float, spacing: float, tails: bool = False) -> _Rounded:
    """Normals on the multiples of `spacing`."""
    std = np.sqrt(np.maximum(np.square(std / spacing) - 1 / 12, 0.0))  # rounding adds 1/12
    return _Rounded(mean / spacing, np.broadcast_to(std, mean.shape), tails)


def _std(width: Any) -> Any:
    return NARROWEST * np.exp(width * WIDTH_STEP)


@functools.lru_cache(maxsize=1 << 16)
def _table(width: int, rest: int, below: int, above: int, sharpness: float | None) -> Any:
    """The distribution of the offsets from -below to above, counted from 0."""
    std, mean, model = float(_std(width)), rest / RESTS, _stream().model
    if below + above > LONGEST:
        return model.QuantizedGaussian(0, below + above, below + mean, std)
    offset = torch.arange(-below, above).double()
    means, stds = torch.full_like(offset, mean), torch.full_like(offset, std)
    beyond = (
        torch.special.ndtr((means - offset - 0.5) / stds)
        if sharpness is None
        else mass_beyond(offset, means, stds, torch.full_like(offset, sharpness))
    )
    ends = torch.ones(1), beyond, torch.zeros(1)
    return model.Categorical(-torch.diff(torch.cat(ends)).clamp(max=0).numpy(), perfect=False, lazy=False)


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
    model.check_direct("compression")
    if model.bins is None:
        raise UsageError("only binned data has a finite number of bits. Pass a model with bins.")
    return model.bins
