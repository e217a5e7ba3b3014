"""The FID extractor: 8-bit images of any size to 2048 features, with the published weights.

An image is resized to 299 x 299 by the bilinear resize of TensorFlow 1 and scaled to (x - 128) / 128. Output pixel i of
that resize reads the input at i * in / out: no half-pixel shift, no antialiasing. The value is
interpolated between the two nearest pixels (the upper one clamped to the image), with f the fraction of the coordinate:

    value = lower + (upper - lower) * f        along each row first, then along each column,

all in float32, in this order, as in TensorFlow's kernel. Another resize (half-pixel, antialiased, through 8 bits)
changes the FID by up to whole points, so values are comparable only with the same resize.

Weights are safetensors with the key names of pytorch-fid (`Mixed_5b.branch1x1.conv.weight`, `...bn.running_mean`), by
path or from the data folder; if they are not there, the file that pytorch-fid published is downloaded and converted.
Each batch norm (eps = 0.001) is folded into its convolution, in float64:

    weight' = weight * gamma / sqrt(var + eps),    bias' = beta - mean * gamma / sqrt(var + eps)
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from bsi.download import download
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, write_bytes
from bsi.metrics.features import QualityWarning, require_images
from bsi.metrics.inception_network import Conv, Network

NAME = "inception-2015-12-05"
OTHER_NAME = "inception-other"
SIZE = 299
BATCH_NORM_EPS = 0.001

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

PUBLISHED_HASH = "f52412653ee45bed604b0f4fa0d3942ce5f50784fece9766dfa6cbecddbe4555"
"""`weights_hash` of the published weights: a distance is called FID only with these weights."""

Precision = Literal["float32", "tf32", "float16"]
"""The precision of products in convolutions: float32; TF32, which rounds float32 inputs to 11 bits; or float16 weights
and activations, with the same 11 bits. Sums, the resize, the last pool and the features are float32 in each."""


class Inception:
    """`Extractor` of the 2048 features of FID.

    Args:
        weights: A safetensors file; by default the published weights.
        precision: By default tf32 on a GPU and float32 on the CPU.
        batch: The number of images in memory at a time.
        compile: Compile the network, for one batch size: smaller batches are padded.
    """

    resize = "tf1-bilinear-299"
    dim = 2048

    def __init__(
        self,
        weights: Path | None = None,
        device: str | torch.device = "cpu",
        precision: Precision | None = None,
        batch: int = 128,
        compile: bool = False,
    ) -> None:
        self.device = _present(device)
        self.precision: Precision = precision or ("tf32" if self.device.type == "cuda" else "float32")
        if self.precision not in get_args(Precision):
            raise UsageError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")
        if self.precision == "tf32" and self.device.type != "cuda":
            raise UsageError(f"precision 'tf32' needs an NVIDIA GPU, got device {self.device}. Use 'float32'.")
        published = read_weights(weights or cached_weights())
        self.hash = weights_hash(published)
        self.name = NAME if self.hash == PUBLISHED_HASH else OTHER_NAME
        if self.hash != PUBLISHED_HASH:
            warnings.warn(
                f"these are not the published weights of {NAME} (expected {PUBLISHED_HASH[:16]}, found "
                f'{self.hash[:16]}): distances are called "fd-{self.name}" and cannot be compared with a published FID',
                QualityWarning,
                stacklevel=2,
            )
        self.batch, self.compiled = batch, compile
        dtype = torch.float16 if self.precision == "float16" else torch.float32
        network = Network().eval().requires_grad_(False)
        network.load_state_dict(folded(published))
        for conv in network.modules():
            if isinstance(conv, Conv):
                conv.weight.data = conv.weight.contiguous(memory_format=torch.channels_last)
        self._network = network.to(self.device, dtype)
        self._features = torch.compile(self._pixels_to_features) if compile else self._pixels_to_features

    @torch.no_grad()
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n 2048"]:
        require_images(images)
        pieces = []
        with _convolutions(self.precision):
            for piece in images.split(self.batch) if len(images) else ():
                missing = self.batch - len(piece) if self.compiled else 0
                padded = F.pad(piece.to(self.device, non_blocking=True), (0, 0, 0, 0, 0, 0, 0, missing))
                pieces.append(self._features(padded)[: len(piece)])
        return torch.cat(pieces) if pieces else torch.empty(0, self.dim, device=self.device)

    def _pixels_to_features(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n 2048"]:
        pixels = (tf1_bilinear(images.float(), SIZE) - 128) / 128
        dtype = self._network.Conv2d_1a_3x3.weight.dtype
        return self._network(pixels.to(dtype, memory_format=torch.channels_last))


def tf1_bilinear(images: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c size size"]:
    """`images` resized to size x size."""
    rows = _interpolate(images, size, dim=3)
    return _interpolate(rows, size, dim=2)


def _interpolate(x: Float[Tensor, "n c h w"], size: int, dim: int) -> Float[Tensor, "n c _ _"]:
    length = x.shape[dim]
    scale = torch.tensor(length, dtype=torch.float32, device=x.device) / size
    coordinate = torch.arange(size, dtype=torch.float32, device=x.device) * scale
    lower = coordinate.floor()
    fraction = (coordinate - lower).view([-1 if axis == dim else 1 for axis in range(4)])
    start = lower.long()
    end = (start + 1).clamp(max=length - 1)
    below, above = x.index_select(dim, start), x.index_select(dim, end)
    return below + (above - below) * fraction


def _present(device: str | torch.device) -> torch.device:
    """The device, if it exists. Only CPUs and CUDA GPUs have the float64 that the moments need."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UsageError(f"device must be cpu, cuda or cuda:INDEX, got {str(device)!r}.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {str(device)!r} does not exist: torch has {torch.cuda.device_count()} GPUs. Use cpu.")
    return torch.device(device)


def weights_path() -> Path:
    """The published weights in the data folder."""
    return data_folder() / f"{NAME}.safetensors"


def cached_weights() -> Path:
    """The published weights in the data folder, downloaded if they are not there."""
    path = weights_path()
    if path.is_file():
        return path
    with _exclusive(path):
        if not path.is_file():
            fetched = download(URL, path.with_name(URL.rpartition("/")[2]), SHA256, f"put it into {path.parent}")
            state = torch.load(fetched, map_location="cpu", weights_only=True)  # runs no code
            write_bytes(path, save({name: state[name].contiguous() for name in expected_shapes()}))
            fetched.unlink()
    return path


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Wait until no other process makes `path`: ranks that all need a file wait for the one that fetches it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released on closing
        yield


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors that the network needs, by pytorch-fid's names, validated; others (its last layer) are not used."""
    if not os.path.isfile(path):
        raise DataError(
            f"the weights of the FID network are not at {path}. They are the state dict of pytorch-fid's published "
            f"network (pt_{NAME}), saved with safetensors.torch.save_file: put them there, or name the file: "
            "bsi fid A B --weights PATH, bsi eval RUN --fid --inception PATH."
        )
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is not a valid safetensors file ({error}). Download or convert it again.") from error
    expected = expected_shapes()
    if missing := sorted(expected.keys() - found.keys()):
        raise DataError(
            f"{path} lacks {len(missing)} of the {len(expected)} tensors of the FID network, {missing[0]} first. "
            "Use the weights of pytorch-fid, in its own key names."
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise DataError(f"{path}: {name} must have the shape {shape}, got {tuple(found[name].shape)}.")
    return {name: found[name].float() for name in sorted(expected)}


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published tensors: five for each convolution."""
    with torch.device("meta"):
        network = Network()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, conv in network.named_modules():
        if isinstance(conv, Conv):
            shapes[f"{name}.conv.weight"] = tuple(conv.weight.shape)
            for part in ("weight", "bias", "running_mean", "running_var"):
                shapes[f"{name}.bn.{part}"] = (conv.out_channels,)
    return shapes


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and float32 values, independent of the program that wrote the file."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {tuple(weights[name].shape)}\n".encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


def folded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The network's own state: convolutions with their batch norms folded in."""
    state = {}
    for name in (key.removesuffix(".conv.weight") for key in weights if key.endswith(".conv.weight")):
        gamma, beta, mean, var = (
            weights[f"{name}.bn.{part}"].double() for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma / (var + BATCH_NORM_EPS).sqrt()
        state[f"{name}.weight"] = (weights[f"{name}.conv.weight"].double() * scale.view(-1, 1, 1, 1)).float()
        state[f"{name}.bias"] = (beta - mean * scale).float()
    return state


@contextmanager
def _convolutions(precision: Precision) -> Iterator[None]:
    """Set TF32 for the convolutions inside, and restore the setting afterwards."""
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch's stubs lag behind the setting
    before = conv.fp32_precision
    conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before
