"""From a config, or its name, to the network."""

from bsi.backbones.base import Backbone
from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, resolve
from bsi.backbones.dit import DiT
from bsi.backbones.mlp import MLP
from bsi.backbones.unet import UNet


def build(
    config: BackboneConfig | str, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0
) -> Backbone:
    """The network for data of this shape, e.g. `build("dit-l/2", (3, 32, 32), bins_count=256)`.

    `bins_count` sets the Fourier features, None (continuous data) leaves them out; `num_classes` = 0 is without labels.
    """
    if isinstance(config, str):
        config = resolve(config)
    match config:
        case DiTConfig():
            return DiT(config, shape, bins_count, num_classes)
        case UNetConfig():
            return UNet(config, shape, bins_count, num_classes)
        case MLPConfig():
            return MLP(config, shape, bins_count, num_classes)
