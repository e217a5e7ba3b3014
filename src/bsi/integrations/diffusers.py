"""BSI as a scheduler of Hugging Face diffusers, for its networks and its training and sampling loops.

    scheduler = BSIScheduler()                                               # needs pip install "bsi[diffusers]"
    timesteps = scheduler.sample_timesteps(len(x))                           # training
    noisy = scheduler.add_noise(x, torch.randn_like(x), timesteps)
    output = unet(scheduler.scale_model_input(noisy, timesteps), timesteps).sample
    scheduler.loss(output, x, noisy, timesteps).mean().backward()

    scheduler.set_timesteps(50)                                              # sampling
    x = scheduler.init_noise_sigma * torch.randn(16, 3, 32, 32)
    for t in scheduler.timesteps:
        output = unet(scheduler.scale_model_input(x, t), t).sample
        x = scheduler.step(output, t, x).prev_sample

Time steps follow the convention of diffusers: they fall from `num_train_timesteps`, the noisy end, to 0. With our t =
F(level) in [0, 1] they are (1 - t) num_train_timesteps, and need not be integers. The sample of a loop is the mean of
the belief. The last step predicts from the final belief and returns the sample itself, so there is one time step more
than there are steps. `DiffusersBackbone` makes a network one for `bsi.Model`, which computes its likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.denoiser import COEFFICIENTS, Coefficients
from bsi.errors import UsageError, extra
from bsi.gaussian import over, squared_norm
from bsi.grids import named_grid
from bsi.levels import low_discrepancy
from bsi.methods.bsi import BSI
from bsi.sampling import advance
from bsi.solvers import named_solver

with extra("diffusers", "BSIScheduler"):
    from diffusers import ConfigMixin, SchedulerMixin
    from diffusers.configuration_utils import register_to_config
    from diffusers.utils import BaseOutput
    from diffusers.utils.torch_utils import randn_tensor

Data = Float[Tensor, "batch *data"]


@dataclass
class BSISchedulerOutput(BaseOutput):
    """A step's result: the belief's next mean (or, at the end, the sample), and the prediction that led to it."""

    prev_sample: Tensor
    pred_original_sample: Tensor


class BSIScheduler(SchedulerMixin, ConfigMixin):
    """BSI's levels, preconditioning, loss and solvers in the interface of diffusers' schedulers.

    Args:
        num_train_timesteps: The time step of the noisy end, in the range that the network's embedding expects.
        lambda_0, gamma_0, alpha_M: As in `bsi.BSI`.
        prediction_type: What the network predicts: "edm" (preconditioned, the default) or "epsilon".
        sigma_data: The standard deviation of the data.
        solver: "posterior", "sde2", "ode2" or "churn".
        grid: The levels of the steps: "paper", "edm" or "geometric".
    """

    order = 1

    @register_to_config
    def __init__(
        self, num_train_timesteps: int = 1000, lambda_0: float = 1e-2, gamma_0: float | None = None,
        alpha_M: float = 1e6, prediction_type: str = "edm", sigma_data: float = 0.5, solver: str = "ode2",
        grid: str = "edm",
    ) -> None:  # fmt: skip
        if prediction_type not in COEFFICIENTS:
            raise UsageError(f"prediction_type must be one of {', '.join(COEFFICIENTS)}, got {prediction_type!r}.")
        self.method = BSI(lambda_0, gamma_0, alpha_M)
        self.timesteps = torch.linspace(num_train_timesteps, 0, num_train_timesteps + 1)
        self.num_inference_steps: int | None = None
        self._previous: Tensor | None = None

    @property
    def init_noise_sigma(self) -> float:
        """The standard deviation of the first belief's mean."""
        return float(self.method.prior(torch.ones(1, 1)))

    # ---- Training

    def sample_timesteps(self, count: int, device: torch.device | str = "cpu") -> Float[Tensor, " {count}"]:
        """Random time steps for a batch, evenly spread so that the loss varies less than for independent ones."""
        t = low_discrepancy(count, torch.rand((), dtype=torch.float64, device=device))
        return (self.config.num_train_timesteps * (1 - t)).float()

    def add_noise(self, original_samples: Data, noise: Data, timesteps: Float[Tensor, " batch"]) -> Data:
        """The mean of a belief about the samples at these time steps."""
        return self.method.encoder(self._levels(timesteps, original_samples)).encode(original_samples, noise)

    def scale_model_input(self, sample: Data, timestep: Tensor | float) -> Data:
        """The network's input, of unit variance."""
        return over(self._coefficients(timestep, sample).c_in, sample) * sample

    def loss(
        self, model_output: Data, original_samples: Data, noisy_samples: Data, timesteps: Float[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """2 L_M / n of each sample, the training loss of `bsi.Model`: half of it bounds the nats per dimension."""
        x_hat = self._prediction(model_output, timesteps, noisy_samples)
        density = self.method.levels.density(self._levels(timesteps, noisy_samples)).to(x_hat.dtype)
        return squared_norm(original_samples - x_hat) / density / x_hat[0].numel()

    # ---- Sampling

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose the levels of this many steps. One more prediction, from the last belief, ends the loop."""
        grid = named_grid(self.config.grid)(self.method, num_inference_steps)
        table = named_solver(self.config.solver)(self.method, grid)
        self._grid, self._rows = grid, torch.stack([table.latent, table.x_hat, table.previous, table.eps], dim=1)
        self._index, self._previous = 0, None
        self.num_inference_steps = num_inference_steps
        t = self.method.levels.cdf(grid)
        self.timesteps = (self.config.num_train_timesteps * (1 - t)).clamp(min=0).float().to(device)

    def step(
        self, model_output: Data, timestep: Tensor | float, sample: Data,
        generator: torch.Generator | list[torch.Generator] | None = None, variance_noise: Data | None = None,
        return_dict: bool = True,
    ) -> BSISchedulerOutput | tuple[Tensor]:  # fmt: skip
        """The next belief's mean; after the last time step, the sample.

        `generator` draws the noise of solvers that add any; `variance_noise` is the noise itself.
        """
        if self.num_inference_steps is None:
            raise UsageError("the steps of sampling are not chosen. Call set_timesteps(num_inference_steps) first.")
        if self._index > self.num_inference_steps:
            raise UsageError(f"all {self.num_inference_steps} steps were taken. Call set_timesteps again.")
        x_hat = self._prediction(model_output, timestep, sample)
        following = x_hat
        if self._index < self.num_inference_steps:
            row = self._rows[self._index].to(sample.device, sample.dtype)
            noise = variance_noise
            if noise is None and self._rows[self._index, 3] != 0:
                noise = randn_tensor(sample.shape, generator=generator, device=sample.device, dtype=sample.dtype)
            noise = torch.zeros_like(sample) if noise is None else noise
            previous = torch.zeros_like(x_hat) if self._previous is None else self._previous
            following = advance(sample, x_hat, previous, noise, row)
        self._index, self._previous = self._index + 1, x_hat
        return BSISchedulerOutput(following, x_hat) if return_dict else (following,)

    # ---- Levels

    def _levels(self, timesteps: Tensor | float, like: Data) -> Float[Tensor, " batch"]:
        """The level of each sample. While sampling it is that of the grid, free of the rounding of a time step."""
        known = torch.as_tensor(timesteps, device=like.device).expand(len(like))
        sampling = self.num_inference_steps is not None and self._index <= self.num_inference_steps
        if sampling and bool((known == self.timesteps[self._index].to(like.device)).all()):
            return self._grid[self._index].to(like.device).expand(len(like))
        return self.method.levels.icdf(1 - known.double() / self.config.num_train_timesteps)

    def _coefficients(self, timesteps: Tensor | float, like: Data) -> Coefficients:
        encoder = self.method.encoder(self._levels(timesteps, like))
        return COEFFICIENTS[self.config.prediction_type](encoder, self.config.sigma_data)

    def _prediction(self, output: Data, timesteps: Tensor | float, sample: Data) -> Data:
        """x_hat = c_skip mu + c_out output."""
        coefficients = self._coefficients(timesteps, sample)
        return over(coefficients.c_skip, sample) * sample + over(coefficients.c_out, sample) * output.to(sample.dtype)

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)


class DiffusersBackbone(nn.Module):
    """A network of diffusers for `bsi.Model`, e.g. to compute the likelihood of one trained with `BSIScheduler`.

    Args:
        network: `UNet2DModel`, `DiTTransformer2DModel` or another one with forward(sample, timestep, class_labels).
        num_train_timesteps: That of the scheduler.
    """

    def __init__(self, network: nn.Module, num_train_timesteps: int = 1000) -> None:
        super().__init__()
        self.network, self.num_train_timesteps = network, num_train_timesteps

    def forward(self, x: Data, t: Float[Tensor, " batch"], cond: Tensor | None = None) -> Data:
        labels: dict[str, Any] = {} if cond is None else {"class_labels": cond}
        return self.network(x, self.num_train_timesteps * (1 - t), **labels).sample
