"""Autoencoders for models of latents: ours and those of diffusers, their file, and datasets of latents.

    bsi train autoencoder-f4 --data.name photos
    bsi data latents --from photos --autoencoder runs/autoencoder-f4          # also a folder of diffusers
    bsi train latents --data.name photos-latents
    bsi sample runs/latents                                                   # images

The file autoencoder.safetensors has the weights and, in its metadata, the class and the config as JSON. The dataset of
latents, each run that is trained on it and each export hold a copy. Nothing in it can contain code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.backbones.autoencoder import Autoencoder
from bsi.backbones.config import AutoencoderConfig
from bsi.data.prepare import Block, Part, Preparation
from bsi.data.published import of_dataset
from bsi.data.store import AUTOENCODER, open_dataset
from bsi.errors import BsiError, CorruptCheckpoint, DataError, UsageError, extra
from bsi.io import atomic, canonical_json, parse_json, read_json, read_tensors, write_tensors
from bsi.recipe import from_plain, to_plain
from bsi.rng import standard_normal, subset
from bsi.values import Bins, DataKind, Latents

METADATA = "autoencoder"
OURS, DIFFUSERS = "bsi", ("AutoencoderKL", "AutoencoderTiny")  # classes
PIXELS = 1 << 22  # that are encoded or decoded at a time, for latents 8 times smaller
MEASURED = 512  # training images that the precision of the decoder is measured on
EXPECTED = "a run of `bsi train autoencoder-f4`, its export, or a folder of diffusers' AutoencoderKL or AutoencoderTiny"

Image = Float[Tensor, "batch _ _ _"]


@dataclass(frozen=True, eq=False)
class StoredAutoencoder:
    """A trained `bsi.latents.EncoderDecoder` in float32, with its description. Copies of a model share it."""

    module: nn.Module
    about: Mapping[str, Any]

    @classmethod
    def of(cls, about: Mapping[str, Any], weights: Mapping[str, Tensor], where: str) -> StoredAutoencoder:
        """Build it without allocating more memory than the weights have."""
        try:
            with torch.device("meta"):
                module = _module(str(about["class"]), about["config"], int(about["channels"]))
            module.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, BsiError):
                raise
            raise CorruptCheckpoint(f"the autoencoder of {where} is damaged: {error!s:.300}") from error
        return cls(module.eval().requires_grad_(False), about)

    def encode(self, x: Image) -> tuple[Image, Image]:
        """Mean and standard deviation of the latents of images in [-1, 1]."""
        mean, std = zip(*self._in_parts("encode", x, PIXELS), strict=True)
        return torch.cat(mean), torch.cat(std)

    def decode(self, z: Image) -> Image:
        """Images in [-1, 1] of latents."""
        return torch.cat(self._in_parts("decode", z, PIXELS // 64)).to(z.dtype)

    @cached_property
    def sha256(self) -> str:
        """A hash of the description and the weights."""
        digest = hashlib.sha256(canonical_json(self.about).encode())
        for name, tensor in sorted(self.tensors().items()):
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode() + tensor.numpy().tobytes())
        return digest.hexdigest()

    def tensors(self) -> dict[str, Tensor]:
        """The weights on the host."""
        return {name: tensor.detach().cpu().contiguous() for name, tensor in self.module.state_dict().items()}

    def save(self, path: Path) -> None:
        """Write the file, atomically."""
        with atomic(path) as temporary:
            write_tensors(temporary, self.tensors(), {METADATA: json.dumps(self.about)})

    def __deepcopy__(self, memo: object) -> StoredAutoencoder:
        return self

    @torch.no_grad()
    def _in_parts(self, name: str, x: Image, most: int) -> list[Any]:
        function = getattr(self.module.to(x.device), name)
        return [function(part) for part in x.float().split(max(1, most // x[0, 0].numel()))]


def _module(name: str, config: Any, channels: int) -> nn.Module:
    """An autoencoder of one of the known classes, with `encode` and `decode`."""
    if name == OURS:
        ours = from_plain(AutoencoderConfig, config, "the autoencoder")
        return Autoencoder(ours, (channels, ours.factor, ours.factor))
    return DiffusersAutoencoder(_class_of_diffusers(name).from_config(dict(config)))


def _class_of_diffusers(name: str) -> Any:
    if name not in DIFFUSERS:
        raise UsageError(f"the autoencoder is a {name!s:.80}, expected {OURS}, {' or '.join(DIFFUSERS)}.")
    with extra("diffusers", f"the autoencoder, {name},"):
        import diffusers
    return getattr(diffusers, name)


class DiffusersAutoencoder(nn.Module):
    """`AutoencoderKL` of diffusers, or `AutoencoderTiny`, whose latents have no noise, as an `EncoderDecoder`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def encode(self, x: Image) -> tuple[Image, Image]:
        found = self.network.encode(x)
        if hasattr(found, "latents"):
            return found.latents, torch.zeros_like(found.latents)
        return found.latent_dist.mean, found.latent_dist.std

    def decode(self, z: Image) -> Image:
        return self.network.decode(z).sample


# ---- Opening ---------------------------------------------------------------------------------------------------------


def open_autoencoder(path: str | Path) -> StoredAutoencoder:
    """An autoencoder of ours, by its run, export or file; or one of diffusers, by its folder on this machine."""
    path = Path(path).expanduser()
    if (path / "config.json").is_file() and isinstance(about := read_json(path / "config.json"), dict):
        if (name := about.get("_class_name")) in DIFFUSERS:
            return _of_diffusers(path, str(name))
        if name is not None:
            raise UsageError(f"{path} holds a {name!s:.80}, not an autoencoder. Expected {EXPECTED}.")
    if path.is_file() and (stored := _read(path)) is not None:
        return stored
    from bsi.runtime.export import read_trained  # which reads the autoencoders of models

    try:
        trained = read_trained(path)
    except UsageError as error:
        raise UsageError(f"{error} An autoencoder is {EXPECTED}.") from error
    config = trained.recipe.backbone
    if not isinstance(config, AutoencoderConfig):
        found = f"{path} is a model of data, {type(config).__name__}, not an autoencoder"
        raise UsageError(f"{found}. Expected {EXPECTED}.")
    about = {"class": OURS, "config": to_plain(config), "channels": trained.data.shape[0]}
    return StoredAutoencoder.of(about, trained.weights, str(path))


def _of_diffusers(path: Path, name: str) -> StoredAutoencoder:
    kind = _class_of_diffusers(name)
    try:
        network = kind.from_pretrained(path, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{path} is not an {name} that `save_pretrained` wrote: {reason:.300}") from error
    config = {key: value for key, value in network.config.items() if not key.startswith("_")}
    about = json.loads(json.dumps({"class": name, "config": config, "channels": config["in_channels"]}))
    weights = {f"network.{key}": tensor for key, tensor in network.state_dict().items()}
    return StoredAutoencoder.of(about, weights, str(path))


def _read(path: Path) -> StoredAutoencoder | None:
    """The autoencoder of a file; None if it is another file of safetensors."""
    metadata, weights = read_tensors(path)
    if metadata.keys() != {METADATA}:
        return None
    return StoredAutoencoder.of(parse_json(metadata[METADATA].encode(), path), weights, str(path))


def attached(kind: DataKind, folder: Path) -> StoredAutoencoder | None:
    """The autoencoder in the folder of a dataset or run for data of this kind; None if the data are not latents."""
    if not isinstance(kind, Latents):
        return None
    path = folder / AUTOENCODER
    stored = _read(path) if path.is_file() else None
    if stored is None:
        raise DataError(f"{path} is missing, which decodes the latents. Copy it from the dataset of the latents.")
    return checked(kind, stored, str(path))


def checked(kind: Latents, stored: StoredAutoencoder, where: str) -> StoredAutoencoder:
    """The autoencoder, if it is the one that the latents were encoded by."""
    if stored.sha256 != kind.autoencoder:
        expected = f"expected sha256 {kind.autoencoder[:16]}, got {stored.sha256[:16]}"
        raise CorruptCheckpoint(f"the autoencoder of {where} is not the one of the latents: {expected}.")
    return stored


# ---- Datasets of latents ---------------------------------------------------------------------------------------------


def plan_latents(path: str | Path, autoencoder: str | Path, device: torch.device | str = "cpu") -> Preparation:
    """The plan of encoding the images of a prepared dataset, both splits, with their labels."""
    dataset, device = open_dataset(path), torch.device(device)
    bins = dataset.bins
    if bins is None or len(dataset.shape) != 3 or (bins.low, bins.high) != (-1.0, 1.0):
        found = f"{path} holds samples of shape {dataset.shape} with {dataset.kind!s:.80}"
        raise UsageError(f"{found}, expected images with values from -1 to 1. Prepare some with `bsi data folder`.")
    stored = open_autoencoder(autoencoder)
    if dataset.shape[0] != stored.about["channels"]:
        found = f"{autoencoder} takes images with {stored.about['channels']} channels, got {path} of {dataset.shape}"
        raise UsageError(f"{found}. Prepare the images with --channels {stored.about['channels']}.")
    fit = min(len(dataset.train), MEASURED)
    x = torch.from_numpy(np.array(dataset.split("train")[subset(len(dataset.train), fit)])).to(device)
    mean = _encoded(stored, bins, x[:1], f"{path} of {dataset.shape}")
    kind = Latents(
        0.0, 1.0, dataset.shape, bins.count, _precision(stored, bins, x), dataset.name, dataset.version, stored.sha256
    )
    images = of_dataset(str(path))
    return replace(
        images, name=f"{images.name}-latents", source=f"latents of {images.source}", kind=kind,
        shape=(2 * mean.shape[1], *mean.shape[2:]), options={"images": images.name, "autoencoder": stored.sha256},
        parts=[Part(images.total, partial(_blocks, images, stored, bins, device))], extra={AUTOENCODER: stored.save},
    )  # fmt: skip


def _encoded(stored: StoredAutoencoder, bins: Bins, x: Tensor, where: str) -> Tensor:
    """The means of the latents. Raises for images that do not come back in their own shape."""
    if isinstance(stored.module, Autoencoder):
        stored.module.config.check(tuple(x.shape[1:]))
    fix = "Use images with sides that are multiples of a larger power of two, such as 64."
    try:
        mean, _ = stored.encode(bins.values(x))
        shape = tuple(stored.decode(mean).shape[1:])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the autoencoder cannot encode {where}: {reason:.200}. {fix}") from error
    if shape != x.shape[1:]:
        raise UsageError(f"the autoencoder returns images of {shape} for {where}. {fix}")
    return mean


def _precision(stored: StoredAutoencoder, bins: Bins, index: Tensor) -> float:
    """1 / the mean squared error of reconstructions, at least that of rounding to a bin."""
    squares, count = 0.0, 0
    for ids in torch.arange(len(index), device=index.device).split(64):
        x = bins.values(index[ids])
        mean, std = stored.encode(x)
        x_hat = stored.decode(mean + std * standard_normal(0, ids, 0, tuple(mean.shape[1:])))
        squares, count = squares + float((x_hat - x).double().square().sum()), count + x.numel()
    return 1 / max(squares / count, bins.width**2 / 12)


def _blocks(
    images: Preparation, stored: StoredAutoencoder, bins: Bins, device: torch.device, start: int
) -> Iterator[Block]:
    for block in images.blocks(start):
        latents = stored.encode(bins.values(torch.from_numpy(np.array(block.rows)).to(device)))
        yield replace(block, rows=torch.cat(latents, 1).cpu().numpy())
