"""The description of a dataset and of a model, and building the model.

The description is part of every checkpoint and export: a model can be built from it without the data. A resumed run
compares its `version`, a hash of the content.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from bsi.backbones import build
from bsi.backbones.config import BackboneConfig
from bsi.backbones.dit import DiT
from bsi.backbones.layers import Backbone
from bsi.backbones.mlp import MLP
from bsi.backbones.unet import UNet
from bsi.data.store import check_classes
from bsi.errors import UsageError
from bsi.methods import Method
from bsi.methods.base import Parametrization
from bsi.model import Model
from bsi.recipe import Recipe, check_name
from bsi.values import Bins, DataKind


@dataclass(frozen=True)
class DataSpec:
    """The properties of the data that a model and a resumed run depend on."""

    name: str
    version: str
    count: int
    shape: tuple[int, ...]
    kind: DataKind
    classes: int = 0
    """The number of classes, with labels 0 .. classes - 1; 0 without labels."""
    class_names: tuple[str, ...] = ()
    """The names of the learned labels, if the data has any."""

    def __post_init__(self) -> None:
        check_classes(self.class_names)  # they may come from a file

    @property
    def bins(self) -> Bins | None:
        """The values of binned data, else None."""
        return self.kind if isinstance(self.kind, Bins) else None

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of a sample's values, which networks are built for."""
        return self.kind.latent_shape(self.shape)

    def build(self, config: BackboneConfig) -> Backbone:
        """A network for this data."""
        return build(config, self.latent_shape, None if self.bins is None else self.bins.count, self.classes)


@dataclass(frozen=True)
class ModelSpec:
    """What `build_model` needs of a `Recipe`: the description of a model that was not trained by one."""

    name: str
    method: Method
    backbone: BackboneConfig | None
    parametrization: Parametrization | None = None
    sigma_data: float = 1.0

    def __post_init__(self) -> None:
        check_name(self.name)


def build_model(recipe: Recipe | ModelSpec, data: DataSpec, backbone: nn.Module | None = None) -> Model:
    """Build the model of a recipe for the described data; `backbone` is the caller's own network."""
    if backbone is None:
        if recipe.backbone is None:
            raise UsageError("this recipe has no network of its own. Pass backbone=...")
        backbone = data.build(recipe.backbone)
    elif isinstance(backbone, Backbone) and backbone.shape != data.latent_shape:
        raise UsageError(
            f"the network and the data have different shapes, got {backbone.shape} and {data.latent_shape}. Build the "
            f"network for the shape of the data."
        )
    return Model(
        backbone,
        recipe.method,
        data.shape,
        data=data.kind,
        parametrization=recipe.parametrization,
        sigma_data=recipe.sigma_data,
        class_names=data.class_names,
    )


def config_of(backbone: nn.Module, data: DataSpec) -> BackboneConfig | None:
    """The config from which `build_model` would build this network for this data; None for any other network."""
    if type(backbone) not in (DiT, UNet, MLP):  # a subclass may compute anything
        return None
    ours = cast(DiT | UNet | MLP, backbone)
    with torch.device("meta"):
        again = data.build(ours.config)

    def layout(network: nn.Module) -> tuple[str, dict[str, torch.Size]]:
        return repr(network), {name: tensor.shape for name, tensor in network.state_dict().items()}

    same = ours.shape == data.latent_shape and again.fourier.exponents == ours.fourier.exponents
    return ours.config if same and layout(again) == layout(ours) else None
