"""The file of a compressed data set.

    magic (4 bytes), size of the header (4), header (JSON, deflated), words (4 bytes each), SHA-256 of all this (32)

Encoder and decoder must compute the same x_hat to the last bit. So the header records the model's hash, the machine and
a hash of some predictions, which the decoder compares before it starts; checksums of each batch and of the data detect
any remaining difference. A file can be decoded only on machines of the same type: the format is not for archives.

The header contains the variance of the transitions too, rounded to bytes. The encoder reads it back before it codes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from bsi.errors import BsiError, DataError, UsageError
from bsi.model import Model
from bsi.values import Bins
from bsi.variance import Correction, Ending, Variance, basis_of

MAGIC = b"BSI\x05"
HASH_BYTES = 32
MOST_HEADER = 1 << 24
MOST_BATCH = 1 << 16
STORED = ("level", "pixels", "dct", "learned")  # the variances that fit into a file
LOG_STEP, LOG_CENTER = 0.125, -12.0  # of a stored ln v, in one byte
LARGEST = 1e9  # magnitude of a number in a stored variance


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
        "ending": _text(torch.stack([*vars(variance.ending).values()]).to(torch.float32)),
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
        ending = Ending(*_numbers(stored["ending"], "<f4").double().reshape(3, -1))
        if len(values[0]) != int(basis.groups.max()) + 1 or len(values) < 2 or len(ending.cost) != len(values):
            raise ValueError(f"{tuple(values.shape)} variances for data of shape {shape}")
        numbers = [*vars(ending).values(), torch.tensor(stored.get("scales", []), dtype=torch.float64)]
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
