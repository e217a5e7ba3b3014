"""What all backbones share: the interface, the checks, and float32 outside with something faster inside.

A backbone maps (x, t, cond) to an array like x. x is scaled to unit variance (c_in mu), t in [0, 1] is 0 at the noisy
end, and the output is exactly 0 before training, so that the preconditioned f = c_skip mu + c_out backbone(c_in mu,
t) begins as the best linear guess.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from bsi.backbones.config import BackboneConfig
from bsi.backbones.embeddings import ConditionEmbedding, FourierFeatures
from bsi.errors import UsageError


class Backbone(nn.Module, ABC):
    """Abstract. `compute_dtype` is the type inside: None leaves that to the caller, who may have set an autocast."""

    compute_dtype: torch.dtype | None = None
    condition: ConditionEmbedding
    config: BackboneConfig

    def __init__(self, shape: tuple[int, ...], bins_count: int | None) -> None:
        super().__init__()
        self.shape = shape
        self.fourier = FourierFeatures(bins_count)

    @property
    def num_classes(self) -> int:
        """Labels 0 .. num_classes - 1 are known, num_classes stands for none; 0: it has no labels."""
        return self.condition.num_classes

    @abstractmethod
    def network(
        self,
        features: Float[Tensor, "batch more_channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None,
    ) -> Float[Tensor, "batch channels *space"]:
        """The network proper, from the Fourier features to the output, in whatever type autocast chooses."""

    @abstractmethod
    def regions(self) -> Iterator[nn.Module]:
        """The parts worth compiling: those that repeat, and those that touch every token or pixel."""

    def matrices(self) -> list[nn.Parameter]:
        """Weights between hidden features: those of every region but the last, which reads out."""
        return [p for region in list(self.regions())[:-1] for p in region.parameters() if p.ndim >= 2]

    def forward(
        self,
        x: Float[Tensor, "batch channels *space"],
        t: Float[Tensor, " batch"],
        cond: Int[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch channels *space"]:
        if x.shape[1:] != self.shape:
            raise UsageError(
                f"this network was built for data of shape {self.shape}: got a batch of {tuple(x.shape[1:])}. "
                "Build it with the shape of the data."
            )
        features = self.fourier(x)  # outside autocast's reach: sines stay in x's own type
        inside = nullcontext() if self.compute_dtype is None else torch.autocast(x.device.type, self.compute_dtype)
        with inside:
            out = self.network(features, t, cond)
        return out.to(x.dtype)
