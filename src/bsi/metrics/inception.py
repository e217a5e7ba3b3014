"""The FID extractor: published weights into the network, 8-bit images of any size into 2048 features.

An image is resized to 299 x 299 by TensorFlow 1's bilinear rule (`bsi.metrics.resize`) and scaled to (x - 128) / 128.
Weights are safetensors in the key names of pytorch-fid (`Mixed_5b.branch1x1.conv.weight`, `...bn.running_mean`), by
path or from the data cache; where it has none, the file that pytorch-fid published is fetched and turned into them.
Each batch norm (eps = 0.001) is folded into its convolution, in float64:

    weight' = weight * gamma / sqrt(var + eps),    bias' = beta - mean * gamma / sqrt(var + eps)
"""

from __future__ import annotations

import hashlib
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
from bsi.metrics import resize
from bsi.metrics.cache import alone
from bsi.metrics.extractor import QualityWarning, require_images
from bsi.metrics.inception_network import Conv, Network

NAME = "inception-2015-12-05"
OTHER_NAME = "inception-other"
SIZE = 299
BATCH_NORM_EPS = 0.001

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

PUBLISHED_HASH = "f52412653ee45bed604b0f4fa0d3942ce5f50784fece9766dfa6cbecddbe4555"
"""`weights_hash` of the published weights: a distance is called FID with these alone."""

Precision = Literal["float32", "tf32", "float16"]
"""What the convolutions multiply: float32; TF32, which is float32 rounded to 11 bits on the way in; or float16 weights
and activations, which carry the same 11 bits. Sums, the resize, the last pool and the features are float32 in each."""


class Inception:
    """`Extractor` of the 2048 features of FID.

    `batch` bounds the memory: more images than that are taken in pieces. With `compile` the pieces are padded to one
    size, so that the network is compiled once.
    """

    resize = resize.NAME
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
            raise UsageError(f"precision must be one of {', '.join(get_args(Precision))}: got {self.precision!r}")
        if self.precision == "tf32" and self.device.type != "cuda":
            raise UsageError(f"precision 'tf32' exists on NVIDIA GPUs only: got device {self.device}. Use 'float32'.")
        published = read_weights(weights or cached_weights())
        self.hash = weights_hash(published)
        self.name = NAME if self.hash == PUBLISHED_HASH else OTHER_NAME
        if self.hash != PUBLISHED_HASH:
            warnings.warn(
                f"these are not the published weights of {NAME} (expected {PUBLISHED_HASH[:16]}, found "
                f'{self.hash[:16]}): distances are called "fd-{self.name}" and compare with no published FID',
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
        pixels = (resize.tf1_bilinear(images.float(), SIZE) - 128) / 128
        dtype = self._network.Conv2d_1a_3x3.weight.dtype
        return self._network(pixels.to(dtype, memory_format=torch.channels_last))


def _present(device: str | torch.device) -> torch.device:
    """`device` when it is there. Others than these two have no float64 for the moments."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal():
        raise UsageError(f"device must be cpu, cuda or cuda:INDEX: got {str(device)!r}.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {str(device)!r} is not here: torch sees {torch.cuda.device_count()} GPUs. Use 'cpu'.")
    return torch.device(device)


def weights_path() -> Path:
    """Where the weights are looked for: the data cache, $BSI_DATA or ~/.cache/bsi-data."""
    return data_folder() / f"{NAME}.safetensors"


def cached_weights() -> Path:
    """The weights in the data cache, fetched when they are not there."""
    path = weights_path()
    if path.is_file():
        return path
    with alone(path):
        if not path.is_file():
            fetched = download(URL, path.with_name(URL.rpartition("/")[2]), SHA256, f"put it into {path.parent}")
            state = torch.load(fetched, map_location="cpu", weights_only=True)  # tensors: nothing in the file is run
            write_bytes(path, save({name: state[name].contiguous() for name in expected_shapes()}))
            fetched.unlink()
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors the network needs, in pytorch-fid's names, checked; others (its last layer) are left out."""
    if not path.is_file():
        raise DataError(
            f"the weights of the FID network are not at {path}. They are the state dict of pytorch-fid's published "
            f"network (pt_{NAME}), saved with safetensors.torch.save_file: put them there, or name the file: "
            "bsi fid A B --weights PATH, bsi eval RUN --fid --inception PATH."
        )
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is no whole safetensors file ({error}). Fetch or convert it again.") from error
    expected = expected_shapes()
    if missing := sorted(expected.keys() - found.keys()):
        raise DataError(
            f"{path} lacks {len(missing)} of the {len(expected)} tensors of the FID network, {missing[0]} first. "
            "Use the weights of pytorch-fid, in its own key names."
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise DataError(f"{path}: {name} must have the shape {shape}: got {tuple(found[name].shape)}.")
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
    """SHA-256 over names, shapes and float32 values: the same whichever program wrote the file."""
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
    """TF32 on or off for the convolutions inside, whatever the program around has chosen for its own."""
    conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch's stubs lag behind the setting
    before = conv.fp32_precision
    conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before
