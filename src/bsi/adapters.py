"""Convert between predictors and denoisers with EDM's or DDPM's interface.

A latent psi is a measurement of x, z = psi / signal = x + sigma eps with sigma = noise / signal. So EDM's
denoiser D(z, sigma) = E[x | z] is a predictor, and a predictor is such a denoiser at the level whose latents have
noise sigma,

    alpha = (1 + sqrt(1 + 4 c sigma^2)) / (2 sigma^2).

A network that predicts the noise of x_t = sqrt(alpha_bar) x + sqrt(1 - alpha_bar) eps (DDPM and most later models) can
be converted too, with 1 / sigma^2 = alpha_bar / (1 - alpha_bar). All conversions are exact up to rounding.

    predict = from_noise_prediction(BSI(), lambda x_t, a: unet(x_t, schedule.time(a)), schedule.sigma_max)
    images = sample(BSI(), predict, noise, edm_grid(BSI(), 15), "ode2")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bsi.errors import UsageError
from bsi.gaussian import Data, PerSample, over
from bsi.grids import EDM_SIGMA
from bsi.methods.base import Method, Predictor, level_at, rho_at

GaussianDenoiser = Callable[[Data, PerSample], Data]  # D(z, sigma), EDM's interface
# eps(x_t, alpha_bar). alpha_bar is float64, because 1 - alpha_bar loses most of its digits in float32 at low noise.
NoiseNetwork = Callable[[Data, PerSample], Data]


def from_denoiser(method: Method, denoiser: GaussianDenoiser, sigma_max: float = EDM_SIGMA) -> Predictor:
    """D(z, sigma) as a predictor for BSI, BFN or VDM.

    Where a latent has more noise than D was trained for (sigma > sigma_max; BSI and BFN start at infinity), D is
    evaluated at sigma_max, for a z with the same standardized noise.
    """

    def predictor(latent: Data, level: PerSample) -> Data:
        encoder = method.encoder(level)
        known = encoder.signal * sigma_max > encoder.noise
        signal, noise = torch.where(known, encoder.signal, 1.0), torch.where(encoder.noise > 0, encoder.noise, 1.0)
        sigma = torch.where(known, encoder.noise / signal, sigma_max)
        # z = psi / signal, or sigma_max w if its noise exceeds sigma_max, with w = psi / noise (0 if both are 0)
        scale = torch.where(known, 1 / signal, sigma_max / noise)
        return denoiser(over(scale, latent) * latent, sigma.to(latent.dtype))

    return predictor


def as_denoiser(method: Method, predict: Predictor) -> GaussianDenoiser:
    """A predictor as D(z, sigma), for samplers and tools that expect EDM's interface."""
    low, high = method.levels.low, method.levels.high

    def denoiser(z: Data, sigma: PerSample) -> Data:
        level = level_at(method, 1 / sigma.double())
        if not bool(((level >= low * (1 - 1e-6)) & (level <= high * (1 + 1e-6))).all()):
            most, least = (1 / rho_at(method, torch.tensor([low, high], dtype=torch.float64))).tolist()
            got = f"got {float(sigma.min()):.3g} to {float(sigma.max()):.3g}"
            raise UsageError(f"sigma must be in the model's range, {least:.3g} to {most:.3g}: {got}")
        level = level.clamp(low, high)
        return predict(over(method.encoder(level).signal, z) * z, level)

    return denoiser


def from_noise_prediction(method: Method, network: NoiseNetwork, sigma_max: float = EDM_SIGMA) -> Predictor:
    """eps(x_t, alpha_bar) as a predictor: x_hat = (x_t - sqrt(1 - alpha_bar) eps) / sqrt(alpha_bar)."""

    def denoiser(z: Data, sigma: PerSample) -> Data:
        alpha_bar = 1 / (1 + sigma.double().square())
        x_t = over(torch.sqrt(alpha_bar), z) * z
        return z - over(sigma.double(), z) * network(x_t, alpha_bar)

    return from_denoiser(method, denoiser, sigma_max)


def as_noise_prediction(method: Method, predict: Predictor) -> NoiseNetwork:
    """A predictor as eps(x_t, alpha_bar)."""
    denoiser = as_denoiser(method, predict)

    def network(x_t: Data, alpha_bar: PerSample) -> Data:
        alpha_bar = alpha_bar.double()
        sigma = torch.sqrt((1 - alpha_bar) / alpha_bar)
        z = x_t / over(torch.sqrt(alpha_bar), x_t)
        return (z - denoiser(z, sigma)) / over(sigma, x_t)

    return network


@dataclass(frozen=True)
class Schedule:
    """A table of alpha_bar over time steps, as DDPM has, for networks whose input is the time."""

    alpha_bar: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.alpha_bar) < 2 or not all(1 > a > b > 0 for a, b in itertools.pairwise(self.alpha_bar)):
            raise UsageError("a schedule needs at least two values of alpha_bar that fall from below 1 to above 0")

    @classmethod
    def ddpm(cls, steps: int = 1000, first: float = 1e-4, last: float = 0.02) -> Schedule:
        """Ho et al. (2020): betas linear in time."""
        betas = torch.linspace(first, last, steps, dtype=torch.float64)
        return cls(tuple(torch.cumprod(1 - betas, 0).tolist()))

    @property
    def sigma_max(self) -> float:
        return ((1 - self.alpha_bar[-1]) / self.alpha_bar[-1]) ** 0.5

    def time(self, alpha_bar: PerSample) -> PerSample:
        """The fractional time step with this alpha_bar, in float32, as the network's input.

        It is interpolated linearly in the log-odds of alpha_bar and clamped to the ends of the table.
        """
        table = torch.logit(torch.tensor(self.alpha_bar, dtype=torch.float64, device=alpha_bar.device)).flip(0)
        place = torch.logit(alpha_bar.double()).clamp(table[0], table[-1])
        right = torch.searchsorted(table, place.contiguous()).clamp(1, len(table) - 1)
        inside = (place - table[right - 1]) / (table[right] - table[right - 1])
        return (len(table) - 1 - (right - 1 + inside)).float()
