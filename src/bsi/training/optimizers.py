"""The update of the weights: AdamW, or Muon for the matrices inside a network and AdamW for the rest.

Muon (Jordan and others, 2024) takes momentum steps whose matrices have all singular values near one:

    M <- beta M + (1 - beta) G
    N  = beta M + (1 - beta) G                            Nesterov's look ahead
    W <- W - lr (0.2 sqrt(max(m, n)) U + decay W)         U: the polar factor of N, by five Newton-Schulz steps

The factor (Liu and others, 2025) gives a step the root mean square of AdamW's, so that both share one rate and one
decay. Its matrices are those between hidden features; filters of convolutions count as (out, in x window). What embeds,
modulates and reads out, and every vector, is AdamW's; so is a matrix whose rows do not lie one after the other (torch's
own layers make none).

Both stand still where a step is not to count: a flag on the device, which no step waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bsi.backbones.base import Backbone
from bsi.recipe import Optimizer
from bsi.runtime.lerp import lerp_

__all__ = ["GatedAdamW", "Muon", "Optimizers", "inner_matrices", "polar"]

# A quintic that brings every singular value in 0 .. 1 into 0.7 .. 1.2: quickly rather than exactly.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
ADAMS_SIZE = 0.2


class GatedAdamW(torch.optim.AdamW):
    """Fused AdamW that stands still where `found_inf` is 1, and divides the gradients by `grad_scale`.

    Both are what torch.amp.GradScaler sets on a fused optimizer: its kernel reads them on the device.
    """

    found_inf: Tensor
    grad_scale: Tensor


def polar(matrices: Float[Tensor, "count rows columns"]) -> Float[Tensor, "count rows columns"]:
    """Roughly U V^T of each matrix U S V^T. In bfloat16 on a GPU: what is rounded there is below what is rough."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def by_rows(matrix: Tensor, like: Tensor) -> Float[Tensor, "rows columns"]:
    """(out, in x window), its columns in the order in which those of `like` lie in memory: there, without a copy.

    The polar factor does not mind: it has the columns of its matrix, in whatever order they come.
    """
    order = sorted(range(1, like.ndim), key=like.stride, reverse=True)
    return matrix.permute(0, *order).flatten(1)


class Muon:
    """The momenta of some matrices, in their order, and the step. Matrices of one shape are turned together."""

    def __init__(self, matrices: Sequence[nn.Parameter], beta: float, decay: float) -> None:
        self.matrices, self.beta, self.decay = list(matrices), beta, decay
        self.momenta = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.matrices]
        self._alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, p in enumerate(self.matrices):
            self._alike[(len(p), p[0].numel())].append(i)

    @torch.no_grad()
    def step(self, lr: Float[Tensor, ""], scale: Float[Tensor, ""], counts: Bool[Tensor, ""]) -> None:
        """One step on the gradients over `scale`, if it counts."""
        lr = lr * counts
        for (rows, columns), alike in self._alike.items():
            weights = [by_rows(self.matrices[i], self.matrices[i]) for i in alike]
            momenta = [by_rows(self.momenta[i], self.matrices[i]) for i in alike]
            # 0 where the step does not count: what is not finite would outlive a factor of 0.
            grads = torch.where(counts, torch.stack([self._gradient(i) for i in alike]) / scale, 0.0)
            lerp_(momenta, grads.unbind(), (1 - self.beta) * counts)
            turned = polar(torch.stack(momenta).lerp_(grads, 1 - self.beta))
            torch._foreach_mul_(weights, 1 - self.decay * lr)
            torch._foreach_sub_(weights, (turned * (ADAMS_SIZE * max(rows, columns) ** 0.5 * lr)).unbind())

    def _gradient(self, i: int) -> Float[Tensor, "rows columns"]:
        matrix = self.matrices[i]
        return by_rows(torch.zeros_like(matrix) if matrix.grad is None else matrix.grad, matrix)


def inner_matrices(network: nn.Module) -> Sequence[Tensor]:
    """Those between hidden features; of a network from elsewhere, of all its layers but the first and the last."""
    if isinstance(network, Backbone):
        return network.matrices()
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return [layer.weight for layer in layers[1:-1]]


class Optimizers:
    """What a recipe's optimizer is for a network's parameters, by name."""

    def __init__(self, network: nn.Module, settings: Optimizer) -> None:
        named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        inner = inner_matrices(network) if settings.kind == "muon" else []
        turned = {id(p) for p in inner if by_rows(p, p).data_ptr() == p.data_ptr()}
        self._muon = {n: p for n, p in named.items() if id(p) in turned}
        self._adam = {n: p for n, p in named.items() if id(p) not in turned}
        self.muon = Muon(list(self._muon.values()), settings.momentum, settings.weight_decay)
        betas = (settings.beta_1, settings.beta_2)
        self.adam = GatedAdamW(
            self._adam.values(),
            lr=settings.lr,
            betas=betas,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=True,  # its count of steps, too, is on the device
        )
        for p in self._adam.values():  # what AdamW would do at its first step; so a checkpoint is whole from the start
            self.adam.state[p] = {"step": torch.zeros((), device=p.device)} | {
                kind: torch.zeros_like(p, memory_format=torch.preserve_format) for kind in ("exp_avg", "exp_avg_sq")
            }

    def zero_grad(self) -> None:
        for p in (*self._adam.values(), *self._muon.values()):
            p.grad = None

    def step(self, lr: Float[Tensor, ""], scale: Float[Tensor, ""], counts: Bool[Tensor, ""]) -> None:
        """Move the weights by their gradients over `scale`, if the step counts."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.found_inf, self.adam.grad_scale = (~counts).float(), scale
        self.adam.step()
        self.muon.step(lr, scale, counts)

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, by name."""
        adam = {f"{kind}/{n}": value for n, p in self._adam.items() for kind, value in self.adam.state[p].items()}
        return adam | {f"momentum/{n}": m for n, m in zip(self._muon, self.muon.momenta, strict=True)}
