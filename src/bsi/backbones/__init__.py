"""Networks: a backbone maps (x, t, cond) to an array like x, and its output is 0 before training.

`config` (sizes and names) and `cost` (parameters, FLOPs) import no torch; the rest is imported when first used.

    network = build("dit-l/2", shape=(3, 32, 32), bins_count=256)
    network.compute_dtype = compute_dtype("auto", device)
    accelerate(network, device)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bsi.backbones.config import BackboneConfig, DiTConfig, MLPConfig, UNetConfig, resolve
from bsi.backbones.cost import Cost, cost
from bsi.devices import Precision, compute_dtype

if TYPE_CHECKING:
    from bsi.backbones.acceleration import accelerate, compile_regions, freeze
    from bsi.backbones.backbone import Backbone, build

_HOME = {
    "accelerate": "bsi.backbones.acceleration",
    "freeze": "bsi.backbones.acceleration",
    "Backbone": "bsi.backbones.backbone",
    "build": "bsi.backbones.backbone",
    "compile_regions": "bsi.backbones.acceleration",
}

__all__ = [
    "Backbone",
    "BackboneConfig",
    "Cost",
    "DiTConfig",
    "MLPConfig",
    "Precision",
    "UNetConfig",
    "accelerate",
    "build",
    "compile_regions",
    "compute_dtype",
    "cost",
    "freeze",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'bsi.backbones' has no attribute {name!r}; it has {', '.join(__all__)}")
