"""What a model cannot take, refused in words before anything is computed: what it was, and what to pass instead."""

from __future__ import annotations

import inspect

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.denoiser import Condition
from bsi.errors import DataError, UsageError
from bsi.methods.base import Method

__all__ = [
    "check_backbone",
    "check_condition",
    "check_finite",
    "check_labels",
    "check_method",
    "check_tensor",
    "check_width",
]


def check_method(method: object) -> None:
    if isinstance(method, type):
        raise UsageError(f"a method is an object, not its class: got {method.__name__}. Pass {method.__name__}().")
    if not isinstance(method, Method):
        raise UsageError(f"a method is bsi.BSI(), bsi.BFN() or bsi.VDM(): got {method!r}")


def check_backbone(backbone: object) -> None:
    """What can be told of a network before it is called: that it is one, and takes what it will be given."""
    if isinstance(backbone, type):
        name = backbone.__name__
        raise UsageError(f"a network is an object, not its class: got {name}. Pass {name}(...).")
    if not callable(backbone):
        raise UsageError(f"a network is a torch module: got {backbone!r}. bsi.backbones.build(name, shape) makes ours.")
    call = backbone.forward if isinstance(backbone, nn.Module) else backbone
    try:
        takes = inspect.signature(call)
    except (TypeError, ValueError):  # not written in Python
        return
    if not (_binds(takes, "input", "t") or _binds(takes, "input", "t", "cond")):
        raise UsageError(
            f"a network is called as network(input, t), or network(input, t, cond) with a condition: got "
            f"{type(backbone).__name__}, whose forward is {takes}. Give it a forward(self, input, t), t the time in "
            f"[0, 1] of each sample; one that needs no t may ignore it."
        )


def _binds(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def check_tensor(data: object) -> None:
    if not isinstance(data, Tensor):
        raise UsageError(f"data is a torch.Tensor: got a {type(data).__name__}. Pass torch.as_tensor(data).")


def check_finite(data: Float[Tensor, "batch *data"]) -> None:
    if not bool(torch.isfinite(data).all()):
        bad = int((~torch.isfinite(data)).flatten(1).any(1).sum())
        raise DataError(f"data holds NaN or infinity in {bad} of {len(data)} samples: remove or repair them")


def check_width(data: Tensor, network: nn.Module) -> None:
    """NumPy makes float64, of which a layer in float32 would say no more than that it cannot multiply it."""
    if data.dtype != torch.float64:
        return
    widths = {p.dtype for p in network.parameters() if p.is_floating_point()}
    if widths and torch.float64 not in widths:
        raise UsageError("data is float64, and the network is not: pass data.float(), or make it network.double()")


def check_condition(cond: Condition | None, num: int) -> None:
    """One row of each condition for each sample: too many would be dropped silently."""
    named = cond if isinstance(cond, dict) else {} if cond is None else {"cond": cond}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"a condition is a torch.Tensor, or a dict of them: got a {type(value).__name__} as {name}. Classes "
                f"are numbers, one for each sample: torch.tensor([0, 1, ...])."
            )
        if value.ndim == 0:
            raise UsageError(f"a condition has one row per sample: got one number as {name}. Use {name}.expand({num}).")
        if len(value) != num:
            raise UsageError(f"a condition has one row per sample: got {len(value)} rows of {name} for {num} samples")


def check_labels(cond: Condition | None, classes: int | None) -> None:
    """Only labels that a network of ours knows; one past the last stands for none. A GPU would not survive others."""
    if not isinstance(cond, Tensor) or not classes or cond.is_floating_point():
        return
    low, high = int(cond.min()), int(cond.max())
    if low < 0 or high > classes:
        raise UsageError(f"this network has labels 0 to {classes - 1}: got {low if low < 0 else high}")
