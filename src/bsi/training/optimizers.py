"""The update of the weights: AdamW, or Muon for the matrices inside a network and AdamW for the rest.

Muon (Jordan et al., 2024) takes momentum steps whose matrices have all singular values near one:

    M <- beta M + (1 - beta) G
    N  = beta M + (1 - beta) G                            Nesterov momentum
    W <- W - lr (0.2 sqrt(max(m, n)) U + decay W)         U: the polar factor of N, by five Newton-Schulz steps

The factor (Liu et al., 2025) matches the root mean square of AdamW's updates, so that both share one learning rate and
one weight decay. Muon updates the matrices between hidden features; filters of convolutions are matrices of shape
(out, in x window). Embeddings, modulation, the output layer, every vector, and a matrix whose rows are not contiguous
(torch's layers make none) are updated by AdamW. A step that does not count, by a flag on the device, changes nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bsi.backbones.layers import Backbone
from bsi.recipe import Optimizer
from bsi.runtime.ema import lerp_

# A quintic polynomial whose iteration maps singular values in 0 .. 1 to about 0.7 .. 1.2 in few steps.
A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5
ADAMS_SIZE = 0.2

# From a rank's rows of matrices and the number of all rows, the same rows of the polar factors.
Orthogonalize = Callable[[Tensor, int], Tensor]


class Optimizers:
    """The optimizers of a network's parameters, with the recipe's settings.

    `parts` are a rank's parts of the parameters, by name, of which `orthogonalize` gathers matrices (sharding.py).
    """

    def __init__(
        self, network: nn.Module, settings: Optimizer, parts: Mapping[str, nn.Parameter] | None = None,
        orthogonalize: Orthogonalize | None = None,
    ) -> None:  # fmt: skip
        named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        parts = named if parts is None else parts
        inner = {id(p) for p in inner_matrices(network)} if settings.kind == "muon" else set[int]()
        matrices = {n: parts[n] for n, p in named.items() if id(p) in inner}
        self._muon = {n: p for n, p in matrices.items() if by_rows(p, p).data_ptr() == p.data_ptr()}
        self._adam = {n: parts[n] for n in named if n not in self._muon}
        betas, decay = (settings.beta_1, settings.beta_2), settings.weight_decay
        shapes = [named[n].shape for n in self._muon]
        self.muon = Muon(list(self._muon.values()), settings.momentum, decay, shapes, orthogonalize)
        self.adam: Any = torch.optim.AdamW(  # capturable: the step count is on the device
            self._adam.values(), settings.lr, betas, weight_decay=decay, fused=True, capturable=True
        )
        for p in self._adam.values():  # as in AdamW's first step, so that checkpoints always have all tensors
            self.adam.state[p] = {"step": torch.zeros((), device=p.device)} | {
                kind: torch.zeros_like(p, memory_format=torch.preserve_format) for kind in ("exp_avg", "exp_avg_sq")
            }

    def step(self, lr: Float[Tensor, ""], scale: Float[Tensor, ""], counts: Bool[Tensor, ""]) -> None:
        """Update the weights with their gradients divided by `scale`, if the step counts."""
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.found_inf, self.adam.grad_scale = (~counts).float(), scale  # as torch.amp.GradScaler does
        self.adam.step()
        self.muon.step(lr, scale, counts)

    def state(self) -> dict[str, Tensor]:
        """The tensors that the next step depends on, by name."""
        adam = {f"{kind}/{n}": value for n, p in self._adam.items() for kind, value in self.adam.state[p].items()}
        return adam | {f"momentum/{n}": m for n, m in zip(self._muon, self.muon.momenta, strict=True)}


class Muon:
    """Muon for the given matrices. Matrices of equal shape are updated together.

    If `matrices` are some rows of matrices of the given `shapes`, `orthogonalize` returns the same rows of the polar
    factors, and the matrices are updated one after the other, so that only one is gathered at a time.
    """

    def __init__(
        self, matrices: Sequence[nn.Parameter], beta: float, decay: float,
        shapes: Sequence[torch.Size] | None = None, orthogonalize: Orthogonalize | None = None,
    ) -> None:  # fmt: skip
        self.matrices, self.beta, self.decay = list(matrices), beta, decay
        self.orthogonalize = orthogonalize or (lambda parts, rows: polar(parts))
        self.momenta = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.matrices]
        self._alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for i, shape in enumerate(shapes or [p.shape for p in self.matrices]):
            self._alike[(shape[0], math.prod(shape[1:]), i if orthogonalize else 0)].append(i)

    @torch.no_grad()
    def step(self, lr: Float[Tensor, ""], scale: Float[Tensor, ""], counts: Bool[Tensor, ""]) -> None:
        """One step with the gradients divided by `scale`, if it counts."""
        lr = lr * counts
        for (rows, columns, _), alike in self._alike.items():
            weights = [by_rows(self.matrices[i], self.matrices[i]) for i in alike]
            momenta = [by_rows(self.momenta[i], self.matrices[i]) for i in alike]
            # torch.where, since a factor of 0 would keep a gradient that is not finite.
            grads = torch.where(counts, torch.stack([_gradient(self.matrices[i]) for i in alike]) / scale, 0.0)
            lerp_(momenta, grads.unbind(), (1 - self.beta) * counts)
            factors = self.orthogonalize(torch.stack(momenta).lerp_(grads, 1 - self.beta), rows)
            torch._foreach_mul_(weights, 1 - self.decay * lr)
            torch._foreach_sub_(weights, (factors * (ADAMS_SIZE * max(rows, columns) ** 0.5 * lr)).unbind())


def _gradient(matrix: nn.Parameter) -> Float[Tensor, "rows columns"]:
    return by_rows(torch.zeros_like(matrix) if matrix.grad is None else matrix.grad, matrix)


def polar(matrices: Float[Tensor, "count rows columns"]) -> Float[Tensor, "count rows columns"]:
    """An approximation of U V^T for each matrix U S V^T.

    It is computed in bfloat16 on a GPU: the rounding error is smaller than the error of the approximation.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


def by_rows(matrix: Tensor, like: Tensor) -> Float[Tensor, "rows columns"]:
    """A view of shape (out, in x window), with the columns in the order in which `like` has them in memory.

    The polar factor does not depend on that order: permuting the columns of a matrix permutes those of its factor.
    """
    order = sorted(range(1, like.ndim), key=like.stride, reverse=True)
    return matrix.permute(0, *order).flatten(1)


def inner_matrices(network: nn.Module) -> Sequence[Tensor]:
    """The matrices between hidden features; for other networks, the weights of all layers but the first and last."""
    if isinstance(network, Backbone):
        return network.matrices()
    layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return [layer.weight for layer in layers[1:-1]]
