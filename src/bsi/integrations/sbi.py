"""A conditional model as a density estimator of sbi, for neural posterior estimation (https://sbi-dev.github.io/sbi).

    inference = NPE(prior, density_estimator=sbi_estimator())               # needs pip install "bsi[sbi]"
    inference.append_simulations(theta, x).train()
    posterior = inference.build_posterior()
    posterior.sample((1000,), x=observed)
    posterior.log_prob(samples, x=observed)

The loss is that of the method, and samples are drawn by its default solver. `log_prob` is the density of the
probability flow with the exact trace, one backward pass for each parameter of the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bsi.errors import extra
from bsi.methods import BSI, Method
from bsi.model import Model
from bsi.values import Standardize

with extra("sbi", "SbiEstimator"):
    from sbi.neural_nets.estimators import ConditionalDensityEstimator

FREQUENCIES = 8  # of t


class SbiEstimator(ConditionalDensityEstimator):
    """p(input | condition) by a model whose network takes the condition: `forward(latent, t, cond)`.

    Args:
        model: A model of continuous vectors.
        condition_shape: The shape of one condition.
        steps: Steps of the sampler.
    """

    def __init__(self, model: Model, condition_shape: Sequence[int], steps: int = 32) -> None:
        super().__init__(model, torch.Size(model.shape), torch.Size(condition_shape))
        self.steps = steps

    def loss(self, input: Tensor, condition: Tensor, **given: Any) -> Tensor:
        return self.net(input, condition)

    def sample(self, sample_shape: Sequence[int], condition: Tensor, **given: Any) -> Tensor:
        self._check_condition_shape(condition)
        num = math.prod(sample_shape)
        seed = int(torch.randint(2**62, ()))  # like all randomness of sbi, it follows torch's generator
        cond = condition.repeat(num, *[1] * (condition.ndim - 1))
        drawn = self.net.sample(len(cond), steps=self.steps, seed=seed, cond=cond, batch_size=4096)
        return drawn.reshape(*sample_shape, len(condition), *self.input_shape)

    def log_prob(self, input: Tensor, condition: Tensor, **given: Any) -> Tensor:
        self._check_condition_shape(condition)
        self._check_input_shape(input)
        input, condition, batch = self._broadcast_and_align(input, condition)
        found = self.net.log_likelihood(
            input.flatten(0, 1), condition.flatten(0, 1), probes=None, tolerance=1e-3, batch_size=4096
        )
        return found.to(input).reshape(len(input), batch)


def sbi_estimator(
    method: Method | None = None, width: int = 128, depth: int = 4, embedding: nn.Module | None = None, steps: int = 32
) -> Callable[[Tensor, Tensor], SbiEstimator]:
    """A builder for the argument `density_estimator` of sbi's NPE.

    Args:
        method: By default BSI with alpha_M = 1e4: samples have noise of 0.01 in units of the data's deviation.
        width, depth: The size of the network, a residual MLP.
        embedding: A network that summarizes a condition as a vector. By default the condition itself, standardized.
        steps: Steps of the sampler.
    """

    def build(theta: Tensor, x: Tensor) -> SbiEstimator:
        network = ConditionedMLP(theta[0].numel(), x, width, depth, embedding)
        model = Model(network, method or BSI(alpha_M=1e4), tuple(theta.shape[1:]), Standardize.fit(theta))
        return SbiEstimator(model, x.shape[1:], steps)

    return build


class ConditionedMLP(nn.Module):
    """A residual MLP of a vector, the time and a summary of the condition, whose output is 0 at first."""

    center: Tensor
    scale: Tensor

    def __init__(self, size: int, x: Tensor, width: int, depth: int, embedding: nn.Module | None) -> None:
        super().__init__()
        self.embedding = embedding or nn.Flatten()
        self.register_buffer("center", x.mean(0))
        self.register_buffer("scale", x.std(0).clamp(min=1e-6))
        with torch.no_grad():
            summary = self.embedding((x[:2] - self.center) / self.scale).shape[1]
        self.first = nn.Linear(size + summary + 2 * FREQUENCIES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.last = nn.Linear(width, size)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, latent: Tensor, t: Tensor, cond: Tensor) -> Tensor:
        angle = math.pi * t[:, None].to(latent.dtype) * 2.0 ** torch.arange(FREQUENCIES, device=t.device)
        summary = self.embedding((cond - self.center) / self.scale)
        hidden = self.first(torch.cat([latent, angle.sin(), angle.cos(), summary], 1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)
