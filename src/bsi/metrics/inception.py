"""The FID extractor: 8-bit images of any size to 2048 features, with the published weights.

An image is resized to 299 x 299 by the bilinear resize of TensorFlow 1 and scaled to (x - 128) / 128. Output pixel i of
that resize reads the input at i * in / out: no half-pixel shift, no antialiasing. The value is interpolated between the
two nearest pixels (the upper one clamped to the image), with f the fraction of the coordinate:

    value = lower + (upper - lower) * f        along each row first, then along each column,

all in float32, in this order, as in TensorFlow's kernel. Another resize (half-pixel, antialiased, through 8 bits)
changes the FID by up to whole points, so values are comparable only with the same resize.

Weights are safetensors with the key names of pytorch-fid (`Mixed_5b.branch1x1.conv.weight`, `...bn.running_mean`), by
default its published ones, which are downloaded and converted. Each batch norm (eps = 0.001) is folded into its
convolution, in float64:

    weight' = weight * gamma / sqrt(var + eps),    bias' = beta - mean * gamma / sqrt(var + eps)
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from bsi.data.prepare import exclusive
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, download, write_bytes
from bsi.metrics.quality import OTHER_NAME, PUBLISHED_HASH, QualityWarning, require_images

NAME = "inception-2015-12-05"
SIZE = 299
URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"

# The precision of products in convolutions: float32; TF32, which rounds float32 inputs to 11 bits; or float16 weights
# and activations, with the same 11 bits. Sums, the resize, the last pool and the features are float32 in each.
Precision = Literal["float32", "tf32", "float16"]


class Inception:
    """`Extractor` of the 2048 features of FID.

    Args:
        weights: A safetensors file; by default the published weights.
        precision: By default tf32 on a GPU and float32 on the CPU.
        batch: The number of images in memory at a time.
    """

    resize = "tf1-bilinear-299"
    dim = 2048

    def __init__(
        self,
        weights: Path | None = None,
        device: str | torch.device = "cpu",
        precision: Precision | None = None,
        batch: int = 128,
    ) -> None:
        self.device, self.batch = torch.device(device), batch
        cuda = self.device.type == "cuda"
        self.precision: Precision = precision or ("tf32" if cuda else "float32")
        if self.precision == "tf32" and not cuda:
            raise UsageError(f"precision 'tf32' needs an NVIDIA GPU, got device {self.device}. Use 'float32'.")
        tensors = read_weights(weights or cached_weights())
        self.hash = weights_hash(tensors)
        self.name = NAME if self.hash == PUBLISHED_HASH else OTHER_NAME
        if self.hash != PUBLISHED_HASH:
            found = f"not the published weights of {NAME} (expected {PUBLISHED_HASH[:16]}, found {self.hash[:16]})"
            warnings.warn(f'{found}: distances are called "fd-{self.name}", not FID', QualityWarning, stacklevel=2)
        self.dtype = torch.float16 if self.precision == "float16" else torch.float32
        network = Network().requires_grad_(False)
        network.load_state_dict(tensors, strict=False)  # they lack the numbers of training batches
        for conv in [module for module in network.modules() if isinstance(module, Conv)]:
            conv.fold()
        self._network = network.to(self.device, self.dtype)

    @torch.no_grad()
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n 2048"]:
        require_images(images)
        features = [torch.empty(0, self.dim, device=self.device)]
        conv = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # torch's stubs lag behind the setting
        before, conv.fp32_precision = conv.fp32_precision, "tf32" if self.precision == "tf32" else "ieee"
        try:
            for piece in images.split(self.batch) if len(images) else ():
                values = piece.to(self.device, non_blocking=True).float()
                pixels = (tf1_bilinear(values, SIZE) - 128) / 128
                features.append(self._network(pixels.to(self.dtype, memory_format=torch.channels_last)))
        finally:
            conv.fp32_precision = before  # the program's own setting
        return torch.cat(features)


def tf1_bilinear(images: Float[Tensor, "n c h w"], size: int) -> Float[Tensor, "n c size size"]:
    """`images` resized to size x size: along each row, then along each column."""
    x = images
    for dim in (3, 2):
        length = x.shape[dim]
        scale = torch.tensor(length, dtype=torch.float32, device=x.device) / size
        coordinate = torch.arange(size, dtype=torch.float32, device=x.device) * scale
        lower = coordinate.floor()
        fraction = (coordinate - lower).view([-1 if axis == dim else 1 for axis in range(4)])
        start = lower.long()
        below, above = x.index_select(dim, start), x.index_select(dim, (start + 1).clamp(max=length - 1))
        x = below + (above - below) * fraction
    return x


def weights_path() -> Path:
    """The published weights in the data folder."""
    return data_folder() / f"{NAME}.safetensors"


def cached_weights() -> Path:
    """The published weights in the data folder, downloaded if they are not there."""
    path = weights_path()
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(path, wait=True):  # ranks that all need the file wait for the one that fetches it
        if not path.is_file():
            fetched = download(URL, path.with_name(URL.rpartition("/")[2]), SHA256, f"put it into {path.parent}")
            state = torch.load(fetched, map_location="cpu", weights_only=True)  # runs no code
            write_bytes(path, save({name: state[name].contiguous() for name in expected_shapes()}))
            fetched.unlink()
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors that the network needs, by pytorch-fid's names, validated; others (its last layer) are not used."""
    if not os.path.isfile(path):
        fix = "bsi fid A B --weights PATH, bsi eval RUN --fid --inception PATH"
        raise DataError(f"pytorch-fid's weights pt_{NAME}, as safetensors, are not at {path}. Name the file: {fix}.")
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise DataError(f"{path} is not a valid safetensors file ({error}). Download or convert it again.") from error
    expected = expected_shapes()
    if lacking := [name for name in expected if name not in found or tuple(found[name].shape) != expected[name]]:
        lacks = f"lacks {len(lacking)} of the {len(expected)} tensors of the FID network, {lacking[0]} first"
        raise DataError(f"{path} {lacks}. Use the weights of pytorch-fid, in its own key names and shapes.")
    return {name: found[name].float() for name in sorted(expected)}


def expected_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the published tensors: five for each convolution."""
    with torch.device("meta"):
        state = Network().state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def weights_hash(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and float32 values, independent of the program that wrote the file."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {tuple(weights[name].shape)}\n".encode())
        digest.update(weights[name].detach().cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


class Conv(nn.Module):
    """A convolution, its batch norm, which is folded into it before use, and a ReLU.

    At stride 1 it keeps the size unless `valid`.
    """

    def __init__(
        self, ins: int, outs: int, kernel: int | tuple[int, int] = 1, stride: int = 1, valid: bool = False
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid or stride > 1 else (height // 2, width // 2)
        self.conv = nn.Conv2d(ins, outs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outs, eps=0.001)

    def fold(self) -> None:
        weight, bn = self.conv.weight.double(), cast(Any, self.bn.double())
        scale = bn.weight / (bn.running_var + bn.eps).sqrt()
        weight = (weight * scale.view(-1, 1, 1, 1)).float().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(weight, requires_grad=False)
        self.conv.bias = nn.Parameter((bn.bias - bn.running_mean * scale).float(), requires_grad=False)
        del self.bn

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d i j"]:
        return F.relu(self.conv(x), inplace=True)


AVERAGE = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
MAXIMUM = nn.MaxPool2d(3, stride=1, padding=1)
HALVE = nn.MaxPool2d(3, stride=2)
Convs = list[tuple[Any, ...]]  # for each convolution its output channels, kernel and, if it is not 1, its stride


class Mixed(nn.Module):
    """Chains of convolutions next to each other, and a pool, with a 1 x 1 convolution to `pooled` channels if not 0.

    A kernel "cross" is (1, 3) and (3, 1) next to each other, at the end of a chain.
    """

    def __init__(self, ins: int, pool: nn.Module, pooled: int, **branches: Convs) -> None:
        super().__init__()
        self.pool, self.chains = pool, []
        for branch, convs in branches.items():
            chain, channels = [], ins
            for number, (outs, kernel, *stride) in enumerate(convs, 1):
                name = f"{branch}_{number}" if len(convs) > 1 else branch
                parts = {f"{name}a": (1, 3), f"{name}b": (3, 1)} if kernel == "cross" else {name: kernel}
                for part, size in parts.items():
                    self.add_module(part, Conv(channels, outs, size, *stride))
                chain.append([self.get_submodule(part) for part in parts])
                channels = outs
            self.chains.append(chain)
        self.branch_pool = Conv(ins, pooled) if pooled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for chain in self.chains:
            outputs = [x]
            for convs in chain:
                outputs = [conv(outputs[0]) for conv in convs]
            found += outputs
        return torch.cat([*found, self.branch_pool(self.pool(x))], 1)


def _a(ins: int, pooled: int) -> Mixed:
    """35 x 35: windows of 1, 5 and 3 + 3 pixels."""
    double: Convs = [(64, 1), (96, 3), (96, 3)]
    return Mixed(ins, AVERAGE, pooled, branch1x1=[(64, 1)], branch5x5=[(48, 1), (64, 5)], branch3x3dbl=double)


def _c(width: int) -> Mixed:
    """17 x 17: windows of 7, each as a row and a column."""
    once: Convs = [(width, 1), (width, (1, 7)), (192, (7, 1))]
    twice: Convs = [(width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))]
    return Mixed(768, AVERAGE, 192, branch1x1=[(192, 1)], branch7x7=once, branch7x7dbl=twice)


def _e(ins: int, pool: nn.Module) -> Mixed:
    """8 x 8: windows of 3 as a row and a column."""
    double: Convs = [(448, 1), (384, 3), (384, "cross")]
    return Mixed(ins, pool, 192, branch1x1=[(320, 1)], branch3x3=[(384, 1), (384, "cross")], branch3x3dbl=double)


class Network(nn.Sequential):
    """299 x 299 pixels in [-1, 1] to 2048 features: the mean over the last 8 x 8 positions.

    Inception of 2015-12-05 without its last layer, as in the TensorFlow graph that published FIDs are computed with. It
    differs from the usual Inception v3 in two places: average pools do not count the padding, and the last block uses a
    maximum instead. Modules are named as in pytorch-fid.
    """

    def __init__(self) -> None:
        double: Convs = [(64, 1), (96, 3), (96, 3, 2)]  # 35 x 35 to 17 x 17
        seven: Convs = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)]  # 17 x 17 to 8 x 8
        layers: dict[str, nn.Module] = {
            "Conv2d_1a_3x3": Conv(3, 32, 3, stride=2),
            "Conv2d_2a_3x3": Conv(32, 32, 3, valid=True),
            "Conv2d_2b_3x3": Conv(32, 64, 3),
            "halve_1": HALVE,
            "Conv2d_3b_1x1": Conv(64, 80),
            "Conv2d_4a_3x3": Conv(80, 192, 3, valid=True),
            "halve_2": HALVE,
            "Mixed_5b": _a(192, 32),
            "Mixed_5c": _a(256, 64),
            "Mixed_5d": _a(288, 64),
            "Mixed_6a": Mixed(288, HALVE, 0, branch3x3=[(384, 3, 2)], branch3x3dbl=double),
            "Mixed_6b": _c(128),
            "Mixed_6c": _c(160),
            "Mixed_6d": _c(160),
            "Mixed_6e": _c(192),
            "Mixed_7a": Mixed(768, HALVE, 0, branch3x3=[(192, 1), (320, 3, 2)], branch7x7x3=seven),
            "Mixed_7b": _e(1280, AVERAGE),
            "Mixed_7c": _e(2048, MAXIMUM),
        }
        super().__init__(OrderedDict(layers))

    def forward(self, input: Float[Tensor, "n 3 299 299"]) -> Float[Tensor, "n 2048"]:
        return super().forward(input).float().mean((2, 3))
