"""The common interface of all networks, and `build`, which creates a network from its config.

A backbone maps (x, t, cond) to an array like x. x is scaled to unit variance (c_in mu), t in [0, 1] is 0 at the noisy
end, and the output is exactly 0 before training, so that the preconditioned f = c_skip mu + c_out backbone(c_in mu,
t) begins as the best linear prediction.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, resolve
from bsi.backbones.cost import cost
from bsi.backbones.embeddings import ConditionEmbedding, FourierFeatures
from bsi.errors import UsageError
from bsi.progress import readable_bytes


class Backbone(nn.Module, ABC):
    """Base class of the networks.

    Attributes:
        compute_dtype: The dtype inside the network, under autocast. With None the caller's autocast applies.
        fast: A faster implementation of the blocks, set by `accelerate`; None for PyTorch's own operations.
    """

    compute_dtype: torch.dtype | None = None
    fast: Any = None
    condition: ConditionEmbedding
    config: BackboneConfig

    def __init__(self, shape: tuple[int, ...], bins_count: int | None) -> None:
        super().__init__()
        self.shape = shape
        self.fourier = FourierFeatures(bins_count)

    @property
    def num_classes(self) -> int:
        """The number of labels; 0 if the network has none. The label `num_classes` stands for no label."""
        return self.condition.num_classes

    @abstractmethod
    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch channels *space"]:
        """The network from the Fourier features to the output, in the dtype selected by autocast."""

    @abstractmethod
    def regions(self) -> Iterator[nn.Module]:
        """The parts to compile: repeated ones, and those that process every token or pixel."""

    def matrices(self) -> list[nn.Parameter]:
        """Weights between hidden features: those of all regions except the last one, the head."""
        return [p for region in list(self.regions())[:-1] for p in region.parameters() if p.ndim >= 2]

    def forward(
        self,
        x: Float[Tensor, "batch channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch channels *space"]:
        if x.shape[1:] != self.shape:
            raise UsageError(
                f"this network was built for data of shape {self.shape}, got a batch of {tuple(x.shape[1:])}. "
                "Build it with the shape of the data."
            )
        features = self.fourier(x)  # outside autocast, so that sines are computed in the dtype of x
        inside = nullcontext() if self.compute_dtype is None else torch.autocast(x.device.type, self.compute_dtype)
        with inside:
            out = self.network(features, t, cond)
        return out.to(x.dtype)


def build(
    config: BackboneConfig | str, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0
) -> Backbone:
    """Build a network for data of one shape, e.g. `build("dit-l/2", (3, 32, 32), bins_count=256)`.

    Args:
        config: A config, or a name that `resolve` knows.
        shape: The shape of one sample, (channels, *space).
        bins_count: The number of bins of the data, which determines the Fourier features; None for continuous data,
            which has no Fourier features.
        num_classes: The number of labels; 0 for a network without labels.

    Raises:
        UsageError: The network cannot take such data, or its weights need more memory than the machine has.
    """
    # These modules import this one.
    from bsi.backbones.dit import DiT
    from bsi.backbones.mlp import MLP
    from bsi.backbones.unet import UNet

    if isinstance(config, str):
        config = resolve(config)
    _check_memory(4 * cost(config, shape, bins_count, num_classes).parameters)
    match config:
        case DiTConfig():
            return DiT(config, shape, bins_count, num_classes)
        case UNetConfig():
            return UNet(config, shape, bins_count, num_classes)
        case MLPConfig():
            return MLP(config, shape, bins_count, num_classes)


def _check_memory(needed: int) -> None:
    """Raise UsageError for weights that need more memory than the machine has, except on the meta device."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > installed and torch.get_default_device().type == "cpu":
        raise UsageError(
            f"the weights of this network need more memory than this machine has, got {readable_bytes(needed)} of "
            f"{readable_bytes(installed)}. Use a smaller width or depth."
        )
