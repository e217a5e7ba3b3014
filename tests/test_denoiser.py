"""Section "Model Design": preconditioning from the encoder, the noise parametrization, the precision encoding."""

import math

import pytest
import torch

from brute_force import mean_and_variance, source
from bsi.denoiser import COEFFICIENTS, REACH, Denoiser, blend, edm, epsilon
from bsi.grids import paper_grid
from bsi.methods import BFN, BSI, VDM, Method
from bsi.oracle import Mixture

METHODS = [BSI(), BFN(), VDM(), BSI(gamma_0=1.0), BSI(lambda_0=1.0, gamma_0=math.inf)]


class Constant(torch.nn.Module):
    """A network that predicts one value, in the dtype it computes in."""

    def __init__(self, value: float = 0.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value, dtype=dtype or torch.float64))
        self.dtype = dtype

    def forward(self, x, t):
        self.seen = (x.detach(), t.detach())
        return self.value.to(self.dtype or x.dtype).expand(x.shape)


def inner_levels(method: Method, count: int = 25) -> torch.Tensor:
    """Levels with a signal: all but the first, where BFN's latent is deterministic."""
    return paper_grid(method, count)[1:]


@pytest.mark.parametrize("sigma_data", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_network_input_and_target_have_unit_variance(method, sigma_data):
    encoder = method.encoder(inner_levels(method))
    coefficients = edm(encoder, sigma_data)
    x = source(0, 2, 0.0, sigma_data)
    for i in range(len(encoder.signal)):
        psi = encoder.signal[i].item() * x + source(1, 2, 0.0, encoder.noise[i].item())
        seen = coefficients.c_in[i].item() * psi
        target = (x - coefficients.c_skip[i].item() * psi) / coefficients.c_out[i].item()
        assert mean_and_variance(seen) == pytest.approx((0, 1), rel=1e-9)
        assert mean_and_variance(target) == pytest.approx((0, 1), rel=1e-4)  # x - c_skip psi cancels at the sharp end


@pytest.mark.parametrize("sigma_data", [1.0, 0.5])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_c_skip_minimizes_c_out(method, sigma_data):
    """c_out^2 = Var[x - c_skip psi] as a function of c_skip is a parabola: its vertex is the coefficient of the code,
    and its minimum c_out^2.
    """
    encoder = method.encoder(inner_levels(method))
    coefficients = edm(encoder, sigma_data)

    def c_out_squared(c_skip):
        return (1 - c_skip * encoder.signal).square() * sigma_data**2 + (c_skip * encoder.noise).square()

    best = c_out_squared(coefficients.c_skip)
    torch.testing.assert_close(coefficients.c_out.square(), best, rtol=1e-6, atol=1e-20)
    for shift in (-0.1, 0.1):
        assert (c_out_squared(coefficients.c_skip * (1 + shift)) > best).all()


@pytest.mark.parametrize("lambda_0", [1e-4, 1e-2, 1.0])
def test_bsi_coefficients_are_the_kappa_formulas(lambda_0):
    method = BSI(lambda_0)
    level = paper_grid(method, 60)
    kappa = 1 + (level - lambda_0).square() / level
    coefficients = edm(method.encoder(level))
    torch.testing.assert_close(coefficients.c_skip, (level - lambda_0) / kappa, rtol=1e-12, atol=0)
    torch.testing.assert_close(coefficients.c_out, torch.sqrt(1 / kappa), rtol=1e-12, atol=0)
    torch.testing.assert_close(coefficients.c_in, torch.sqrt(level / kappa), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_epsilon_parametrization_solves_for_the_sample(method):
    generator = torch.Generator().manual_seed(0)
    level = inner_levels(method)
    x, eps = torch.randn(2, len(level), generator=generator, dtype=torch.float64)
    encoder = method.encoder(level)
    coefficients = epsilon(encoder)
    psi = encoder.encode(x, eps)
    torch.testing.assert_close(coefficients.c_skip * psi + coefficients.c_out * eps, x, rtol=1e-8, atol=1e-8)
    assert (coefficients.c_in == 1).all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_blend_is_bounded_noise_prediction(method):
    t = torch.tensor([0.0, 1e-9, 0.1, 0.5, 1.0], dtype=torch.float64)
    encoder = method.encoder(method.levels.icdf(t))
    ours, noise = blend(encoder, 0.5), epsilon(encoder)
    assert (ours.c_out <= REACH * 0.5).all()
    for mine, theirs in ((ours.c_skip, noise.c_skip), (ours.c_out, -noise.c_out)):
        torch.testing.assert_close(mine[-1], theirs[-1], rtol=1e-4, atol=0)
    torch.testing.assert_close(ours.c_in, edm(encoder, 0.5).c_in)
    assert torch.isfinite(ours.c_skip).all()


@pytest.mark.parametrize("sigma_data", [1.0, 0.4])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_edm_with_a_zero_network_is_the_posterior_mean_of_gaussian_data(method, sigma_data):
    denoiser = Denoiser(Constant(), method, "edm", sigma_data)
    oracle = Mixture.isotropic(torch.zeros(1, 3, dtype=torch.float64), sigma_data).predictor(method)
    level = inner_levels(method)
    latent = torch.randn(len(level), 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(denoiser(latent, level), oracle(latent, level), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_network_is_given_the_scaled_latent_and_t(method):
    network = Constant()
    denoiser = Denoiser(network, method, "edm")
    t = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    level = method.levels.icdf(t)
    latent = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    denoiser(latent, level)
    seen, seen_t = network.seen
    torch.testing.assert_close(seen_t, t, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen, edm(method.encoder(level)).c_in[:, None, None] * latent)


@pytest.mark.parametrize("parametrization", COEFFICIENTS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_prediction_is_skip_plus_out_times_the_network(method, parametrization):
    level = inner_levels(method, 8)
    latent = torch.randn(len(level), 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    coefficients = COEFFICIENTS[parametrization](method.encoder(level), 1.0)
    expected = coefficients.c_skip[:, None] * latent + coefficients.c_out[:, None] * 0.7
    torch.testing.assert_close(Denoiser(Constant(0.7), method, parametrization)(latent, level), expected)


@pytest.mark.parametrize("parametrization", ["edm", "epsilon"])
def test_bfns_first_prediction_is_finite_in_value_and_gradient(parametrization):
    """Where signal = noise = 0; by default, with the noise parametrization, the prediction is exactly 0."""
    network = Constant(0.3)
    denoiser = Denoiser(network, BFN(), parametrization)
    latent = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    level = torch.tensor([1.0, 1.0], dtype=torch.float64, requires_grad=True)
    x_hat = denoiser(latent, level)
    gradients = torch.autograd.grad(x_hat.sum(), [latent, network.value, level], allow_unused=True)
    assert torch.isfinite(x_hat).all()
    assert all(torch.isfinite(g).all() for g in gradients[:2])
    if parametrization == "epsilon":
        assert (x_hat == 0).all()
    else:
        assert x_hat.tolist() == [[0.3] * 3] * 2  # sigma_data times the network's output for a latent of 0
    assert BFN().parametrization == "epsilon"


@pytest.mark.parametrize("parametrization", COEFFICIENTS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_float32_predictions_agree_with_float64_near_the_start(method, parametrization):
    """Coefficients are computed in float64: only the latent's own rounding is left, amplified by c_skip and c_out."""
    t = torch.tensor([0.0, 1e-12, 1e-9, 1e-6, 1e-3, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    level = method.levels.icdf(t)
    generator = torch.Generator().manual_seed(4)
    x, eps = torch.randn(2, len(t), 16, generator=generator, dtype=torch.float64)
    latent = method.encoder(level).encode(x, eps).float()
    exact = Denoiser(Constant(0.5), method, parametrization)(latent.double(), level)
    ours = Denoiser(Constant(0.5), method, parametrization)(latent, level)
    coefficients = COEFFICIENTS[parametrization](method.encoder(level), 1.0)
    size = coefficients.c_skip[:, None].abs() * latent.abs() + 0.5 * coefficients.c_out[:, None].abs()
    assert ours.dtype == torch.float32
    assert torch.isfinite(ours).all()
    assert ((ours - exact).abs() <= 4e-7 * size).all()


def test_clipping_keeps_predictions_in_the_datas_range():
    level = BFN().levels.icdf(torch.tensor([0.01, 0.5], dtype=torch.float64))
    latent = torch.tensor([[3.0], [-3.0]], dtype=torch.float64)
    free = Denoiser(Constant(), BFN())(latent, level)
    clipped = Denoiser(Constant(), BFN(), clip=(-1.0, 1.0))(latent, level)
    assert free.abs().max() > 1
    torch.testing.assert_close(clipped, free.clamp(-1, 1))


def test_a_condition_is_bound_into_the_predictor():
    class Shifted(torch.nn.Module):
        def forward(self, x, t, cond=None):
            return torch.zeros_like(x) if cond is None else cond["shift"][:, None].expand(x.shape)

    denoiser = Denoiser(Shifted(), BSI())
    latent, level = torch.zeros(2, 3, dtype=torch.float64), torch.tensor([1.0, 4.0], dtype=torch.float64)
    shift = torch.tensor([1.0, 2.0], dtype=torch.float64)
    predict = denoiser.given({"shift": shift})
    expected = edm(BSI().encoder(level)).c_out * shift
    torch.testing.assert_close(predict(latent, level), expected[:, None].expand(2, 3))
    assert (denoiser.given(None)(latent, level) == 0).all()
