"""Networks: a backbone maps (x, t, cond) to an array like x, and its output is 0 before training.

    network = build("dit-l/2", shape=(3, 32, 32), bins_count=256)
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)

`config` (sizes, names, parameters and FLOPs) imports no torch; the rest is imported when first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bsi.backbones.config import AutoencoderConfig, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, resolve
from bsi.backbones.costs import Cost, cost
from bsi.devices import Precision, compute_dtype
from bsi.errors import UsageError
from bsi.progress import readable_bytes

if TYPE_CHECKING:
    from bsi.backbones.acceleration import accelerate, compile_regions, freeze
    from bsi.backbones.layers import Backbone

__all__ = [
    "AutoencoderConfig", "Backbone", "BackboneConfig", "Cost", "DiTConfig", "MLPConfig", "Precision", "UNetConfig",
    "accelerate", "build", "compile_regions", "compute_dtype", "cost", "freeze", "resolve",
]  # fmt: skip


def build(
    config: BackboneConfig | str, shape: tuple[int, ...], bins_count: int | None = None, num_classes: int = 0,
    out_channels: int | None = None,
) -> Backbone:  # fmt: skip
    """Build a network for data of one shape, e.g. `build("dit-l/2", (3, 32, 32), bins_count=256)`.

    Args:
        config: A config, or a name that `resolve` knows.
        shape: The shape of one input, (channels, *space).
        bins_count: The number of bins of the data, which determines the Fourier features; None for continuous data,
            which has no Fourier features.
        num_classes: The number of labels; 0 for a network without labels.
        out_channels: Channels of the output; None for those of the input. For symbols the network returns logits: K
            channels at each position, e.g. `build("dit-mini/1", (K, length), out_channels=K)` for text, or
            `build(config, (1, 28, 28), out_channels=2)` for binary images.

    Raises:
        UsageError: The network cannot take such data, or its weights need more memory than the machine has.
    """
    config = resolve(config) if isinstance(config, str) else config
    needed = 4 * cost(config, shape, bins_count, num_classes, out_channels).parameters
    import torch

    from bsi.backbones.autoencoder import Autoencoder
    from bsi.backbones.dit import DiT
    from bsi.backbones.mlp import MLP
    from bsi.backbones.unet import UNet

    if hasattr(os, "sysconf") and torch.get_default_device().type == "cpu":  # neither Windows nor the meta device
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > installed:
            got = f"got {readable_bytes(needed)} of {readable_bytes(installed)}. Use a smaller width or depth."
            raise UsageError(f"the weights of this network need more memory than this machine has, {got}")
    networks: dict[type, type[Backbone]] = {
        DiTConfig: DiT, UNetConfig: UNet, MLPConfig: MLP, AutoencoderConfig: Autoencoder,
    }  # fmt: skip
    return networks[type(config)](config, shape, bins_count, num_classes, out_channels)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bsi.backbones' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"bsi.backbones.{'layers' if name == 'Backbone' else 'acceleration'}"), name)
