"""The likelihood under the probability flow: exact for the given network, and not a bound.

The flow dw = x_hat d rho carries the prior's Normal at the first level to a density at the last. With the trace of its
Jacobian along the way,

    ln p(z) = ln N(w_0) - int tr(d x_hat / d w) d rho + n ln rho_M,        z = psi / signal = w / rho_M

for z, the sample with the last level's noise sigma_M = 1 / rho_M. The start is exact: BSI's and BFN's at rho = 0, where
w_0 is standard, and VDM's at sqrt(nu_min), where its prior has the variance 1 + nu_min in w. With u = asinh(rho), which
is rho near 0 and ln rho beyond, and v = w / cosh(u), which stays of the data's size,

    dv = (x_hat - v tanh(u)) du,        the trace: tr(d x_hat / d v) du,

integrated backwards by Dormand and Prince's pair of orders 5 and 4. Every sample takes its own steps, so that its
likelihood does not depend on its batch.

Data that is stored in bins is dequantized by noise that the last level could have added: a Normal of deviation sigma_M,
truncated to the bin. Then -ln P(x) <= E[ln q(z | x) - ln p(z)], variational dequantization (Ho et al., 2019) with the
truncated Normal of Zheng et al. (2023). The ELBO bounds the likelihood of another model, the stochastic one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from bsi.errors import NonFinite, UsageError
from bsi.gaussian import Data, PerSample, over
from bsi.methods.base import Method, Predictor, level_at, rho_at
from bsi.rng import standard_normal
from bsi.values import Bins

# (x_hat, v, which of the samples they are) -> tr(d x_hat / d v), or an estimate of it, for each sample.
Divergence = Callable[[Data, Data, Int[Tensor, " batch"]], PerSample]
Watch = Callable[[float], object]  # is called with the share of the integral that a step adds

MOST_STEPS = 10_000


def exact_divergence(x_hat: Data, v: Data, samples: Int[Tensor, " batch"]) -> PerSample:
    """The trace itself: one backward pass for each dimension."""
    flat, total = x_hat.flatten(1), x_hat.new_zeros(len(x_hat))
    for i in range(flat.shape[1]):
        (row,) = torch.autograd.grad(flat[:, i].sum(), v, retain_graph=True)
        total = total + row.flatten(1)[:, i]
    return total


def hutchinson(seed: int, shape: tuple[int, ...], probes: int = 1) -> Divergence:
    """An unbiased estimate of the trace: the mean of s J s over random signs s, the same along a whole trajectory.

    One backward pass for each probe. Independent of the batch, since probes are keyed by the sample.
    """
    if probes < 1:
        raise UsageError(f"Hutchinson's estimate needs at least one probe: got {probes}")

    def divergence(x_hat: Data, v: Data, samples: Int[Tensor, " batch"]) -> PerSample:
        total = x_hat.new_zeros(len(x_hat))
        for probe in range(probes):
            signs = torch.sign(standard_normal(seed, samples, probe, shape)).to(x_hat.dtype)
            (product,) = torch.autograd.grad(x_hat, v, signs, retain_graph=True)
            total = total + (product * signs).flatten(1).sum(1) / probes
        return total

    return divergence


@dataclass(frozen=True)
class Flow:
    """The result for each sample: ln p in nats, the prior's noise w it maps to, and the number of evaluations."""

    log_density: PerSample
    w: Data
    evaluations: int
    n: int

    @property
    def nats_per_dim(self) -> float:
        return -float(self.log_density.mean()) / self.n

    @property
    def bits_per_dim(self) -> float:
        return self.nats_per_dim / math.log(2)

    @property
    def error(self) -> float:
        """Standard error of `bits_per_dim` over the samples and their dequantization noise; NaN for one sample."""
        if len(self.log_density) < 2:
            return math.nan
        return float(self.log_density.std()) / (math.sqrt(len(self.log_density)) * self.n * math.log(2))


def flow_density(
    method: Method,
    predict: Predictor,
    z: Data,
    divergence: Divergence = exact_divergence,
    samples: Int[Tensor, " batch"] | None = None,
    tolerance: float = 1e-6,
    watch: Watch | None = None,
) -> Flow:
    """ln p(z), z the sample with the last level's noise. `tolerance` bounds each step's error, in nats for ln p."""
    if not 0 < tolerance < 1:
        raise UsageError(f"the tolerance is a small positive number of nats: got {tolerance}")
    first, last = _ends(method)
    samples = torch.arange(len(z), device=z.device) if samples is None else samples

    def slope(u: PerSample, v: Data) -> tuple[Data, PerSample]:
        # derivatives are needed, also under the caller's no_grad or inference mode
        with torch.inference_mode(False), torch.enable_grad():
            point = v.detach().clone().requires_grad_()
            x_hat = _prediction(method, predict, u, point, z.dtype)
            trace = divergence(x_hat, point, samples).double()
        return x_hat.detach().double() - over(torch.tanh(u), v) * v, trace.detach()

    begin = last / math.sqrt(1 + last**2) * z.double()
    v, trace, evaluations = _integrate(slope, begin, math.asinh(last), math.asinh(first), tolerance, watch)
    variance, n = 1 + first**2, z[0].numel()  # variance of w at the first level: 1 except for VDM
    w = math.sqrt(variance) * v
    prior = -0.5 * w.square().flatten(1).sum(1) / variance - 0.5 * n * math.log(2 * math.pi * variance)
    # The trace was integrated from the data to the noise, which gives it the sign of this direction: it is added.
    return Flow(prior + trace + n * math.log(last), w, evaluations, n)


def _ends(method: Method) -> list[float]:
    """rho at the first and the last level."""
    return rho_at(method, torch.tensor([method.levels.low, method.levels.high], dtype=torch.float64)).tolist()


def _prediction(method: Method, predict: Predictor, u: PerSample, v: Data, dtype: torch.dtype) -> Data:
    """x_hat at the point v = w / cosh(u) of the flow, where rho = sinh(u)."""
    level = level_at(method, torch.sinh(u)).clamp(method.levels.low, method.levels.high)
    return predict((over(method.encoder(level).noise * torch.cosh(u), v) * v).to(dtype), level)


def binned_flow(
    method: Method,
    predict: Predictor,
    index: Integer[Tensor, "batch *data"],
    bins: Bins,
    uniform: Data,
    divergence: Divergence = exact_divergence,
    samples: Int[Tensor, " batch"] | None = None,
    tolerance: float = 1e-4,
    watch: Watch | None = None,
) -> Flow:
    """A lower bound on ln P(x) for binned data, from one draw of the dequantization noise per sample.

    `uniform` holds random numbers in (0, 1), which the noise is computed from.
    """
    sigma = 1 / float(rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64)))
    reach = 0.5 * bins.width / sigma
    mass = math.erf(reach / math.sqrt(2))
    eps = torch.special.ndtri(0.5 * (1 - mass) + uniform.double() * mass).clamp(-reach, reach)
    z = bins.values(index, torch.float64) + sigma * eps
    log_q = (-0.5 * eps.square() - 0.5 * math.log(2 * math.pi) - math.log(sigma * mass)).flatten(1).sum(1)
    flow = flow_density(method, predict, z.to(uniform.dtype), divergence, samples, tolerance, watch)
    return Flow(flow.log_density - log_q, flow.w, flow.evaluations, flow.n)


def flow_encode(method: Method, predict: Predictor, z: Data, tolerance: float = 1e-4) -> Data:
    """The prior's noise w that the flow maps to z, the sample with the last level's noise."""
    return flow_density(method, predict, z, lambda x_hat, v, samples: x_hat.new_zeros(len(v)), tolerance=tolerance).w


def flow_decode(method: Method, predict: Predictor, w: Data, tolerance: float = 1e-4) -> Data:
    """The sample that the flow maps the prior's noise w to: the inverse of `flow_encode`, then the method's decoding.

    The flow is integrated over -u, so that it goes downwards as in `flow_density`.
    """
    first, last = _ends(method)

    @torch.no_grad()
    def slope(minus_u: PerSample, v: Data) -> tuple[Data, PerSample]:
        x_hat = _prediction(method, predict, -minus_u, v, w.dtype)
        return over(torch.tanh(-minus_u), v) * v - x_hat.double(), torch.zeros_like(minus_u)

    begin = w.double() / math.sqrt(1 + first**2)
    v, _, _ = _integrate(slope, begin, -math.asinh(first), -math.asinh(last), tolerance)
    level = torch.full((len(w),), method.levels.high, dtype=torch.float64, device=w.device)
    noise = method.encoder(level).noise * math.sqrt(1 + last**2)
    with torch.no_grad():
        return method.decode((over(noise, v) * v).to(w.dtype), level, predict)


def arc(a: Data, b: Data, num: int) -> Float[Tensor, "batch num *data"]:
    """`num` points from each a to its b, both included, on an arc of a sphere: between two draws of noise, others."""
    along = torch.linspace(0, 1, num, dtype=torch.float64, device=a.device)
    x, y = a.double().flatten(1), b.double().flatten(1)
    cosine = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)).clamp(min=1e-300)
    angle = torch.arccos(cosine.clamp(-1, 1)).clamp(min=1e-4)[:, None]  # a smaller angle: a straight line
    weights = [torch.sin(t * angle) / torch.sin(angle) for t in (1 - along, along)]
    points = weights[0][..., None] * x[:, None] + weights[1][..., None] * y[:, None]
    return points.to(a.dtype).unflatten(2, a.shape[1:]) if a.ndim > 2 else points.to(a.dtype)


# Dormand and Prince (1980): positions of the stages, their weights of earlier slopes, and fifth minus fourth order.
_STAGES = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_REACHED = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


def _integrate(
    slope: Callable[[PerSample, Data], tuple[Data, PerSample]],
    begin: Data,
    start: float,
    stop: float,
    tolerance: float,
    watch: Watch | None = None,
) -> tuple[Data, PerSample, int]:
    """Integrate v and the trace from `start` down to `stop`, with adaptive steps for each sample.

    All samples are evaluated together until the last has arrived, so that a condition keeps its rows.

    Returns:
        Both, and the number of evaluations. A state holds v, flattened, and the trace in its last column.
    """

    def rates(u: PerSample, state: Float[Tensor, "batch state"]) -> Tensor:
        v, trace = slope(u, state[:, :-1].reshape(begin.shape))
        return torch.cat([v.flatten(1), trace[:, None]], 1)

    def moved(weights: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
        return sum((weight * each for weight, each in zip(weights, slopes, strict=True)), torch.zeros_like(slopes[0]))

    state, evaluations = torch.cat([begin.flatten(1), begin.new_zeros(len(begin), 1)], 1), 1
    u = torch.full_like(state[:, 0], start)
    h = torch.full_like(u, -0.01)
    rate = rates(u, state)
    for _ in range(MOST_STEPS):
        if bool((u <= stop).all()):
            return state[:, :-1].reshape(begin.shape), state[:, -1], evaluations
        length = torch.maximum(h, stop - u)  # 0 for samples that have arrived
        slopes, there = [rate], state
        for where, weights in zip(_STAGES, _REACHED, strict=True):
            there = state + length[:, None] * moved(weights, slopes)
            slopes.append(rates(u + where * length, there))
        evaluations += len(_STAGES)
        gap = length[:, None] * moved(_ERROR, slopes)
        # in units of the noise: an error of w = cosh(u) v moves ln p by about as much
        error = torch.maximum(torch.cosh(u) * gap[:, :-1].contiguous().norm(dim=1), gap[:, -1].abs()) / tolerance
        if not bool(torch.isfinite(error).all()):
            raise NonFinite("the flow is not finite, because the network's predictions are not")
        good = error <= 1
        state = torch.where(good[:, None], there, state)
        rate = torch.where(good[:, None], slopes[-1], rate)
        # the last step ends exactly at `stop`, without rounding
        before, u = u, torch.where(good, torch.where(length <= stop - u, stop, u + length), u)
        h = length * (0.9 * error.clamp(min=1e-9) ** -0.2).clamp(0.2, 5.0)
        if watch is not None:
            watch(float(before.max() - u.max()) / (start - stop))
    raise NonFinite(f"the flow took more than {MOST_STEPS} steps. Use a larger tolerance.")
