"""How layers start, in place.

The output of every backbone is exactly 0 before training since its last layer is (`zero_`); the rest follows what was
published: Xavier for the DiT's blocks, LeCun for VDM's U-Net and for what makes the condition.
"""

from torch import nn

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def zero_(layer: Layer) -> None:
    """What this layer feeds begins as if it were not there."""
    nn.init.zeros_(layer.weight)
    _clear(layer)


def xavier_(layer: nn.Linear) -> None:
    """Uniform, with a variance between what keeps the forward and what keeps the backward pass in scale."""
    nn.init.xavier_uniform_(layer.weight)
    _clear(layer)


def lecun_(layer: Layer) -> None:
    """Normal, with the variance that keeps the forward pass in scale.

    Torch's default has a third of it: over the 33 shortcuts of the U-Net's way up, nothing of the input would be left.
    """
    nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
    _clear(layer)


def _clear(layer: Layer) -> None:
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
