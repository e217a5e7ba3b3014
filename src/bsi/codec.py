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

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Int64, Integer
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
LONGEST = 1 << 9  # of a table
FURTHEST = 1 << 20  # the distance from the end of a table to the last integer that can be coded
# A batch starts only if the stack holds this multiple of the bits that it is expected to take, and these bits more.
MARGIN, RESERVE = 1.1, 64
PROBES = 4  # predictions whose hash a decoder compares before it starts

Watch = Callable[[int, Tensor], None]  # is called with each step and its predictions
Coordinates = Float[Tensor, "batch n"]
Places = Float64[Tensor, "batch n"]  # integers
Numbers = Int[Tensor, " tables"]
Variances = Float[Tensor, "#batch #n"]


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
        place = torch.from_numpy(index).to(self.model.device).double()
        x = self._coordinates(place)
        first = self._start(x).pop(stack)
        latent = self._end(x, first).pop(stack)
        self._decoder(latent).push(stack, place)
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
        place = self._decoder(latent).pop(stack)
        x = self._coordinates(place)
        self._end(x, first).push(stack, latent)
        self._start(x).push(stack, first)
        return place.cpu().numpy().astype(np.int32)

    def probe(self) -> str:
        """A hash of predictions and variances for fixed latents at some levels."""
        sha = hashlib.sha256()
        for i in np.linspace(0, self.last, PROBES).astype(int).tolist():
            eps = standard_normal(0, torch.arange(2), i, (self.n,), torch.float64).to(self.model.device)
            for found in self._predict(i, eps * math.sqrt(self.information[i])):
                sha.update(found.cpu().numpy().tobytes())
        return sha.hexdigest()

    def _coordinates(self, index: Places) -> Coordinates:
        values = self.bins.low + index * self.bins.width
        return self.basis.coordinates(values.reshape(-1, *self.model.shape))

    def _start(self, x: Coordinates) -> _Rounded:
        """q(s_0 | x)."""
        return _latents(self.alpha[0] * x, self.std[0] ** 2, self.spacing[0])

    def _end(self, x: Coordinates, first: Places) -> _Rounded:
        """q(s_k | s_0, x)."""
        mean = first * self.spacing[0] + self.known[-1] * x
        return _latents(mean, self.std[-1] ** 2, self.spacing[-1])

    def _bridge(self, i: int, first: Places, later: Places) -> _Rounded:
        """q(s_i | s_{i+1}, s_0)."""
        share, start = self.known[i] / self.known[i + 1], first * self.spacing[0]
        mean = start + share * (later * self.spacing[i + 1] - start)
        return _latents(mean, self.std[i] ** 2, self.spacing[i])

    def _prior(self, count: int) -> _Rounded:
        """p(s_0)."""
        std = float(self.model.method.prior(torch.ones(1, 1, dtype=torch.float64))) * self.scale[0]
        mean = torch.zeros(count, self.n, dtype=torch.float64, device=self.model.device)
        return _latents(mean, std**2, self.spacing[0], tails=True)

    def _transition(self, i: int, place: Places) -> _Rounded:
        """p(s_{i+1} | s_i)."""
        latent, gained = place * self.spacing[i], self.gained[i]
        x_hat, center, v = self._predict(i, latent)
        self.watch(i, x_hat)
        return _latents(latent + gained * center, gained + gained**2 * v, self.spacing[i + 1], tails=True)

    def _decoder(self, place: Places) -> _Rounded:
        """p(x | s_k), in units of the bins' width."""
        x_hat, center, v = self._predict(self.last, place * self.spacing[-1])
        self.watch(self.last, x_hat)
        return _Rounded(center, v, tails=True, bins=self.bins.count, sharpness=self.sharpness)

    @torch.no_grad()
    def _predict(self, i: int, latent: Coordinates) -> tuple[Tensor, Coordinates, Variances]:
        """x_hat at level i, clipped to the data's range, its coordinates, and their variance.

        At the last level these are the values of x_hat in units of the bins' width, and the decoder's variance. Without
        a `Variance` the last prediction is the result of `method.decode`.
        """
        method, variance = self.model.method, self.variance
        at = latent / self.scale[i] if self.scale[i] else torch.zeros_like(latent)
        psi = self.basis.values(at, at.new_empty(len(at), *self.model.shape)).float()
        level, predict = self.levels[i : i + 1].to(at.device), self.model.denoiser
        each, decodes = level.expand(len(at)), i == self.last and variance is None
        x_hat = method.decode(psi, each, predict) if decodes else predict(psi, each)
        x_hat = torch.nan_to_num(x_hat).clamp(self.bins.low, self.bins.high)
        if i == self.last:
            center = ((x_hat.double() - self.bins.low) / self.bins.width).flatten(1)
            if variance is not None:
                return x_hat, center, variance.decoder(self.bins, each, psi, x_hat)[1].square().flatten(1)
            return x_hat, center, _number(1 / (method.recon_precision * self.bins.width**2), center)
        center = self.basis.coordinates(x_hat.double())
        if variance is None:
            return x_hat, center, _number(0.0, center)
        return x_hat, center, variance.of_coordinates(level, at.float(), center.float())


class _Rounded:
    """Integers that are Normal before they are rounded, as a rounded mean and an offset from it.

    The rest of the mean and the standard deviation are rounded to few values, so that many integers share their
    distribution and are coded by one call with one table. If an offset may lie in the `tails`, beyond the table, the
    table's ends stand for it, and the distance from them is coded uniformly. With `bins`, the first and the last of
    them are the ends of the tables; with a `sharpness`, the distribution is that of `variance.mass_beyond`. Everything
    but the entropy coder runs on the device of the mean.
    """

    def __init__(
        self,
        mean: Coordinates,
        variance: Variances,
        tails: bool,
        bins: int | None = None,
        sharpness: float | None = None,
    ) -> None:
        self.center, self.tails = torch.round(mean), tails
        rest = torch.round((mean - self.center) * RESTS).int()
        square = variance.float().clamp(NARROWEST**2, WIDEST**2) / NARROWEST**2
        width = torch.round(torch.log(square) / (2 * WIDTH_STEP)).int()
        self.last = 4 + torch.ceil(6 * NARROWEST * torch.exp(width * WIDTH_STEP)).int()
        self.below, above, shared = self.last, self.last, width * (RESTS + 1) + rest + RESTS // 2
        if bins is not None:
            self.below, above = self.last.minimum(self.center.int()), self.last.minimum(bins - 1 - self.center.int())
            shared = (shared.long() * bins + self.below) * bins + above
        shared = shared.flatten()
        self.order = _stable_order(shared)
        _, counts = torch.unique_consecutive(shared.index_select(0, self.order), return_counts=True)
        first = self.order[counts.cumsum(0) - counts]
        width, rest, below, above = (x.expand_as(rest).flatten()[first] for x in (width, rest, self.below, above))
        self.tables, self.counts = _tables(width, rest, below, above, sharpness), counts.tolist()

    def pop(self, stack: Any) -> Places:
        found = [stack.decode(table, count) for table, count in zip(self.tables, self.counts, strict=True)]
        symbols = torch.from_numpy(np.concatenate(found)).to(self.center)
        offset = torch.empty_like(symbols).scatter_(0, self.order, symbols).reshape(self.center.shape) - self.below
        if self.tails:
            beyond = torch.nonzero(offset.abs() == self.last, as_tuple=True)
            further = stack.decode(_stream().model.Uniform(FURTHEST), len(beyond[0]))
            offset[beyond] += offset[beyond].sign() * torch.from_numpy(further).to(offset)
        return self.center + offset

    def push(self, stack: Any, place: Places) -> None:
        offset = place - self.center
        further = offset.abs() - self.last
        beyond = further[further >= (0 if self.tails else 1)].cpu().numpy()
        if beyond.max(initial=-1) >= (FURTHEST if self.tails else 0):
            raise UsageError("a latent lies too far from its prediction to be coded. Use more steps, or train longer.")
        stack.encode_reverse(beyond.astype(np.int32), _stream().model.Uniform(FURTHEST))
        ends = (offset.clamp(-self.last, self.last) + self.below).int().flatten()
        symbols, stop = ends.index_select(0, self.order).cpu().numpy(), len(ends)
        for table, count in zip(reversed(self.tables), reversed(self.counts), strict=True):
            stack.encode_reverse(symbols[stop - count : stop], table)
            stop -= count


def _latents(mean: Coordinates, variance: Variances | float, spacing: float, tails: bool = False) -> _Rounded:
    """Normals on the multiples of `spacing`."""
    variance = variance if isinstance(variance, Tensor) else _number(variance, mean)
    return _Rounded(mean / spacing, variance / spacing**2 - 1 / 12, tails)  # rounding adds 1/12


def _number(value: float, like: Tensor) -> Float64[Tensor, "1 1"]:
    return torch.full((1, 1), value, dtype=torch.float64, device=like.device)


def _stable_order(numbers: Integer[Tensor, " n"]) -> Int64[Tensor, " n"]:
    """The order that sorts numbers; equal ones stay in theirs."""
    if numbers.device.type != "cpu":
        return torch.argsort(numbers, stable=True)
    # NumPy sorts 16 bits in linear time, and faster than torch.
    rest = numbers.numpy() - int(numbers.min())
    order = np.argsort(rest.astype(np.uint16), kind="stable")
    for shift in range(16, int(rest.max()).bit_length(), 16):
        order = order[np.argsort((rest[order] >> shift).astype(np.uint16), kind="stable")]
    return torch.from_numpy(order)


def _tables(width: Numbers, rest: Numbers, below: Numbers, above: Numbers, sharpness: float | None) -> list[Any]:
    """The distributions of the offsets from -below to above, counted from 0."""
    model, sizes = _stream().model, below + above + 1
    mean, std = below + rest.double() / RESTS, NARROWEST * torch.exp(width.double() * WIDTH_STEP)
    reach = torch.arange(min(int(sizes.max()), LONGEST), dtype=torch.float64, device=mean.device)
    offset, means, stds = torch.broadcast_tensors(reach, mean[:, None], std[:, None])
    if sharpness is None:
        beyond = torch.special.ndtr((means - offset - 0.5) / stds)
    else:
        beyond = mass_beyond(offset, means, stds, _number(sharpness, offset))
    beyond = torch.where(offset < sizes[:, None] - 1, beyond, 0.0)
    masses = torch.diff(1 - beyond, prepend=torch.zeros_like(beyond[:, :1])).clamp(min=0).cpu().numpy()
    return [
        model.Categorical(mass[:size], perfect=False, lazy=False)
        if size <= LONGEST  # a longer table is computed as it is needed
        else model.QuantizedGaussian(0, size - 1, at, width)
        for mass, size, at, width in zip(masses, sizes.tolist(), mean.tolist(), std.tolist(), strict=True)
    ]


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
