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
constriction (asymmetric numeral systems).

The file:

    magic (4 bytes), size of the header (4), header (JSON, deflated), words (4 bytes each), SHA-256 of all this (32)

Encoder and decoder must compute the same x_hat to the last bit. So the header records the model's hash, the machine and
a hash of some predictions, which the decoder compares before it starts; checksums of each batch and of the data detect
any remaining difference. A file can be decoded only on machines of the same type: the format is not for archives.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, Integer
from torch import Tensor

from bsi.errors import BsiError, DataError, UsageError, extra
from bsi.grids import paper_grid
from bsi.model import Model
from bsi.rng import standard_normal
from bsi.solvers import Path
from bsi.values import Bins
from bsi.variance import Correction, Variance, basis_of

MAGIC = b"BSI\x02"
HASH_BYTES = 32
MOST_HEADER = 1 << 24
MOST_BATCH = 1 << 16
LOG_STEP, LOG_CENTER = 0.125, -12.0  # of a stored ln v, in one byte
SPACING = 1.25  # of the latents' grids, in standard deviations of q or p, whichever is smaller
# Grid points on either side of the mean with nonzero probability (at least 2^-24): REACH for q, LEAST to MOST for p.
REACH, LEAST, MOST = 12, 64, 1 << 12
DEVIATIONS, FURTHEST = 20, 1 << 20  # a long step with a large variance reaches this many standard deviations instead
# A batch starts only if the stack holds this multiple of the bits that it is expected to take, and these bits more.
MARGIN, RESERVE = 1.1, 64
STORED = ("level", "pixels", "dct", "learned")  # the variances that fit into a file
LARGEST = 1e9  # magnitude of a number in a stored variance
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
        self.gained = np.diff(self.alpha)
        # standard deviations of q(s_i | s_{i+1}, s_0), of q(s_k | s_0, x) as the case a_{k+1} = inf, and of q(s_0 | x)
        known = self.known = self.alpha - self.alpha[0]
        self.std = np.sqrt(known * (1 - known / np.append(known[1:], math.inf)))
        self.std[0] = math.sqrt(self.information[0])
        narrower = np.minimum(self.std, np.sqrt(np.append(math.inf, self.gained)))
        self.spacing = np.where(narrower > 0, SPACING * narrower, 1.0)  # BFN's first latent is 0
        # p must be able to code any draw of q, even if the prediction is wrong by the whole range of the data.
        wrong = (bins.high - bins.low) * self.gained / self.spacing[1:]
        self.reach = [LEAST, *np.minimum(MOST, LEAST + np.floor(wrong)).astype(int).tolist()]

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
        stack.encode_reverse(index.reshape(-1), *self._decoder(latent))
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
        index = stack.decode(*self._decoder(latent)).reshape(count, self.n)
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
                sha.update(found.numpy().tobytes())
        return sha.hexdigest()

    def _coordinates(self, index: Integer[np.ndarray, "batch n"]) -> Coordinates:
        values = torch.from_numpy(self.bins.values(index)).reshape(-1, *self.model.shape)
        return self.basis.coordinates(values).numpy()

    def _start(self, x: Coordinates) -> _GridNormal:
        """q(s_0 | x)."""
        return _GridNormal(self.alpha[0] * x, self.std[0], self.spacing[0], REACH)

    def _end(self, x: Coordinates, first: Places) -> _GridNormal:
        """q(s_k | s_0, x)."""
        mean = first * self.spacing[0] + self.known[-1] * x
        return _GridNormal(mean, self.std[-1], self.spacing[-1], REACH)

    def _bridge(self, i: int, first: Places, later: Places) -> _GridNormal:
        """q(s_i | s_{i+1}, s_0)."""
        share, start = self.known[i] / self.known[i + 1], first * self.spacing[0]
        mean = start + share * (later * self.spacing[i + 1] - start)
        return _GridNormal(mean, self.std[i], self.spacing[i], REACH)

    def _prior(self, count: int) -> _GridNormal:
        """p(s_0)."""
        std = float(self.model.method.prior(torch.ones(1, 1, dtype=torch.float64))) * self.scale[0]
        return _GridNormal(np.zeros((count, self.n)), std, self.spacing[0], self.reach[0])

    def _transition(self, i: int, place: Places) -> _GridNormal:
        """p(s_{i+1} | s_i)."""
        gained, (x_hat, v) = self.gained[i], self._watched(i, place)
        mean, std = (
            place * self.spacing[i] + gained * self.basis.coordinates(x_hat).numpy(),
            np.sqrt(gained + gained**2 * v.numpy()),
        )
        return _GridNormal(mean, std, self.spacing[i + 1], self.reach[i + 1])

    def _decoder(self, place: Places) -> tuple[Any, Float64[np.ndarray, " m"], Float64[np.ndarray, " m"]]:
        """p(x | s_k), a Normal over the bins: its mean and standard deviation are in units of their width."""
        x_hat, v = self._watched(self.last, place)
        mean = (x_hat - self.bins.low) / self.bins.width
        std = torch.sqrt(v + 1 / self.model.method.recon_precision) / self.bins.width
        return (
            _stream().model.QuantizedGaussian(0, self.bins.count - 1),
            mean.numpy().reshape(-1),
            std.numpy().reshape(-1),
        )

    def _watched(self, i: int, place: Places) -> tuple[Tensor, Tensor]:
        x_hat, v = self._predict(i, place * self.spacing[i])
        self.watch(i, x_hat)
        return x_hat, v

    @torch.no_grad()
    def _predict(self, i: int, latent: Coordinates) -> tuple[Tensor, Tensor]:
        """x_hat at level i, clipped to the data's range, and its variance: of coordinates, at the last level of values.

        Without a variance the last prediction is the result of `method.decode`.
        """
        method, device = self.model.method, self.model.device
        values = self.basis.values(torch.from_numpy(latent), torch.empty(len(latent), *self.model.shape))
        psi = (values / self.scale[i] if self.scale[i] else torch.zeros_like(values)).float()
        psi, level, predict = psi.to(device), self.levels[i].expand(len(psi)).to(device), self.model.denoiser
        decodes = i == self.last and self.variance is None
        x_hat = method.decode(psi, level, predict) if decodes else predict(psi, level)
        x_hat = torch.nan_to_num(x_hat).clamp(self.bins.low, self.bins.high)
        if self.variance is None:
            v = torch.zeros(len(x_hat), self.n, dtype=torch.float64)
        else:
            v = self.variance.at(level, psi, x_hat)
            v = v if i < self.last else self.basis.variances(v, x_hat).flatten(1)
        return x_hat.cpu().double(), v.cpu()


class _GridNormal:
    """A Normal on the multiples of `spacing`: its rounded mean, and the rest of it and its deviation in grid points."""

    def __init__(self, mean: Coordinates, std: np.ndarray | float, spacing: float, reach: int) -> None:
        mean = mean / spacing
        self.center = np.rint(mean)
        self.rest = (mean - self.center).reshape(-1)
        std = np.sqrt(np.maximum(np.square(std / spacing) - 1 / 12, 1e-8))  # rounding adds 1/12
        self.std = np.ascontiguousarray(np.broadcast_to(std, mean.shape)).reshape(-1)
        self.reach = max(reach, min(FURTHEST, math.ceil(DEVIATIONS * float(self.std.max(initial=0)))))
        self.normal = _stream().model.QuantizedGaussian(-self.reach, self.reach)

    def pop(self, stack: Any) -> Places:
        offset = stack.decode(self.normal, self.rest, self.std).reshape(self.center.shape)
        return self.center.astype(np.int64) + offset

    def push(self, stack: Any, place: Places) -> None:
        offset = place - self.center.astype(np.int64)
        if np.abs(offset).max(initial=0) > self.reach:
            raise UsageError("a latent lies too far from its prediction to be coded. Use more steps, or train longer.")
        stack.encode_reverse(offset.astype(np.int32).reshape(-1), self.normal, self.rest, self.std)


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


# ---- The file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """What a decoder must know."""

    count: int
    plain: int  # number of samples, the first ones, that are stored without the model
    sizes: list[int]  # of the batches of the others
    checks: list[int]  # checksums of the plain samples and of each batch
    steps: int
    variance: dict[str, Any] | None
    model: str  # hashes of the model, of some predictions and of the data
    machine: dict[str, Any]
    probe: str
    sha256: str

    def check(self, model: Model, bins: Bins, bits: int) -> None:
        """Raise if the file belongs to another model, or if these counts do not fit a stack of `bits`."""
        if self.model != (ours := model_hash(model)):
            hashes = f"its hash is {self.model!s:.12}, this model's is {ours:.12}"
            raise UsageError(f"the file was compressed with another model: {hashes}. Pass the one that compressed it.")
        fits = (
            self.plain + sum(self.sizes) == self.count
            and len(self.checks) == len(self.sizes) + 1
            and 1 <= self.steps <= 1 << 20
            and max(self.sizes, default=0) <= MOST_BATCH
            and self.count <= bits
            and self.plain * math.prod(model.shape) * math.log2(bins.count) <= bits + 64
        )
        if not fits:
            raise DataError("the header of the compressed file contradicts itself: `bsi compress` did not write it.")

    def check_predictions(self, model: Model, probe: str) -> None:
        """Raise, before decoding, if predictions on this machine differ from the encoder's."""
        if self.probe == probe:
            return
        pairs = {name: (self.machine.get(name), here) for name, here in machine(model).items()}
        differ = [f"{name}: {there} there, {here} here" for name, (there, here) in pairs.items() if there != here]
        raise UsageError(
            f"this machine computes other predictions than the one that made the file "
            f"({'; '.join(differ) or 'with the same settings'}). Decode it on a machine of the same type."
        )


def pack(header: Header, words: bytes) -> bytes:
    text = zlib.compress(json.dumps(asdict(header), sort_keys=True, separators=(",", ":")).encode(), 9)
    body = MAGIC + struct.pack("<I", len(text)) + text + words
    return body + hashlib.sha256(body).digest()


def unpack(blob: bytes) -> tuple[Header, bytes]:
    """The header and the words of a file; a DataError if it is damaged, cut off, or not from `bsi compress`."""
    start = len(MAGIC) + 4
    if blob[: len(MAGIC)] != MAGIC:
        raise DataError("this is not a file that `bsi compress` wrote, or its first bytes are damaged.")
    if len(blob) < start + HASH_BYTES or hashlib.sha256(blob[:-HASH_BYTES]).digest() != blob[-HASH_BYTES:]:
        raise DataError("the compressed file is damaged or cut off: its SHA-256 is another. Copy it again.")
    (size,) = struct.unpack("<I", blob[len(MAGIC) : start])
    body = blob[start:-HASH_BYTES]
    try:
        header = Header(**json.loads(zlib.decompressobj().decompress(body[:size], MOST_HEADER)))
        counts = (header.count, header.plain, header.steps, *header.sizes, *header.checks)
        if not all(type(value) is int and value >= 0 for value in counts) or type(header.machine) is not dict:
            raise ValueError("a field has another type")
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise DataError(f"the header of the compressed file cannot be read ({error!r:.80}).") from error
    words = body[size:]
    if size > len(body) or len(words) % 4:
        raise DataError("the compressed file is damaged: its sizes do not fit its length.")
    return header, words


def machine(model: Model) -> dict[str, Any]:
    """The settings that affect the last bits of a prediction."""
    network = model.denoiser.backbone
    dtype = getattr(network, "compute_dtype", None) or next((p.dtype for p in network.parameters()), torch.float32)
    device = model.device
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
        "dtype": str(dtype),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def model_hash(model: Model) -> str:
    """Hash of the method, the shape and bins of the data, and the weights."""
    sha = hashlib.sha256(repr((model.method, model.shape, model.bins)).encode())
    for name, tensor in sorted(model.denoiser.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def checksum(index: Integer[np.ndarray, "batch n"]) -> int:
    return zlib.crc32(np.ascontiguousarray(index, dtype="<i4").tobytes())


def data_hash(index: Integer[np.ndarray, "samples n"], bins: Bins) -> str:
    """SHA-256 of the data in the byte format of a dataset."""
    return hashlib.sha256(np.ascontiguousarray(index.astype(bins.dtype)).tobytes()).hexdigest()


def stored_variance(variance: Variance) -> dict[str, Any]:
    """A variance as it is stored in the header: logarithms, the cost of decoding, principal colors and a network."""
    matrices = variance.basis.matrices
    axes = next((matrix for matrix in matrices if matrix is not None), None)
    if axes is not None and len(variance.basis.shape) < 2:
        raise UsageError(
            "compression takes the variances level, pixels, dct and learned: pca does not fit into a file."
        )
    if variance.ending is None:
        raise UsageError("this variance was fitted to data without bins. Fit it with model.fit_variance(train).")
    kind = "level" if variance.values.shape[1] == 1 else "pixels" if axes is None else "dct"
    logs = torch.round((torch.log(variance.values.clamp(min=1e-12)) - LOG_CENTER) / LOG_STEP).clamp(-127, 127)
    stored: dict[str, Any] = {
        "kind": kind if variance.correction is None else "learned",
        "colors": None if matrices[0] is None else matrices[0].tolist(),
        "knots": len(logs),
        "logs": _text(logs.to(torch.int8)),
        "ending": _text(variance.ending.to(torch.float32)),
    }
    if variance.correction is not None:
        weights = [(w, float(w.abs().max()) / 127) for w in variance.correction.state_dict().values()]
        stored["scales"] = [scale for _, scale in weights]
        stored["weights"] = _text(
            torch.cat([torch.round(w / max(scale, 1e-30)).flatten() for w, scale in weights]).to(torch.int8)
        )
    return stored


def _text(numbers: Tensor) -> str:
    return base64.b64encode(numbers.cpu().numpy().tobytes()).decode()


def _numbers(text: str, dtype: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype).copy())


def read_variance(stored: dict[str, Any] | None, model: Model) -> Variance | None:
    """The inverse of `stored_variance`, or None."""
    if stored is None:
        return None
    shape, colors, correction = model.shape, None, None
    try:
        values = torch.exp(LOG_STEP * _numbers(stored["logs"], "i1").double() + LOG_CENTER)
        values = values.reshape(stored["knots"], -1)
        if stored["colors"] is not None:
            colors = torch.tensor(stored["colors"], dtype=torch.float64).reshape(shape[0], shape[0])
        if stored["kind"] not in STORED:
            raise ValueError(f"kind {stored['kind']!r:.20}")
        basis = basis_of(stored["kind"], shape, colors)
        ending = _numbers(stored["ending"], "<f4").double()
        if len(values[0]) != int(basis.groups.max()) + 1 or len(values) < 2 or len(ending) != len(values):
            raise ValueError(f"{tuple(values.shape)} variances for data of shape {shape}")
        numbers = [ending, torch.tensor(stored.get("scales", []), dtype=torch.float64)]
        if colors is not None:
            numbers.append(colors)
        if not float(torch.cat([each.flatten() for each in numbers]).abs().max()) < LARGEST:
            raise ValueError("a number is not finite")
        if stored["kind"] == "learned":
            correction = Correction(shape).eval().requires_grad_(False)
            weights, start = _numbers(stored["weights"], "i1").float(), 0
            for weight, scale in zip(correction.state_dict().values(), stored["scales"], strict=True):
                weight.copy_(scale * weights[start : start + weight.numel()].reshape(weight.shape))
                start += weight.numel()
            correction = correction.to(model.device)
    except (ValueError, KeyError, TypeError, RuntimeError, BsiError) as error:
        raise DataError(f"the variance in the compressed file cannot be read ({error!r:.80}).") from error
    return Variance(basis, model.method, values, ending, correction)
