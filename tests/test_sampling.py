"""Trajectories: their states, evaluations, dependence on the seed, and convergence."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from bsi.brownian import BrownianPath
from bsi.conditioning import denoise, inpainted
from bsi.errors import UsageError
from bsi.grids import geometric_grid, paper_grid
from bsi.methods import BFN, BSI, VDM, Method
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampling import belief, evaluations, measurement, sample, trajectory
from bsi.solvers import SOLVERS, Path, Table
from repetitions import repeat

METHODS = [BSI(), BFN(), VDM()]


def mixture() -> Mixture:
    means = torch.tensor([[-1.0, 0.5], [0.8, 0.9], [0.2, -1.0]], dtype=torch.float64)
    return Mixture.isotropic(means, 0.2)


class Counting:
    """A predictor that counts its calls and samples."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, latent: Tensor, level: Tensor) -> Tensor:
        self.calls += 1
        assert level.shape == (len(latent),)
        return torch.tanh(latent)


def path(seed: int = 1, count: int = 48) -> BrownianPath:
    return BrownianPath(seed, torch.arange(count), (2,), torch.float64)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_k_steps_yield_k_plus_1_states_and_the_stated_evaluations(method, solver):
    predict, grid = Counting(), paper_grid(method, 7)
    steps = list(trajectory(method, predict, path(count=3), grid, solver))
    assert len(steps) == 8
    assert [float(step.level) for step in steps] == grid.tolist()
    assert predict.calls == evaluations(method, 7) == (7 if isinstance(method, VDM) else 8)
    assert torch.equal(sample(method, predict, path(count=3), grid, solver), steps[-1].x_hat)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_samples_of_one_path_converge_with_more_steps(method):
    """Strong convergence of order one, as for additive noise. Each churn has its own limit."""
    predict, counts = mixture().predictor(method), [16, 32, 64, 128]

    def drawn(solver: str, counts: list[int]) -> list[Tensor]:
        return repeat(lambda k: sample(method, predict, path(), geometric_grid(method, k), solver), counts)

    posterior, sde2, churn = drawn("posterior", counts), drawn("sde2", [*counts, 512]), drawn("churn", [*counts, 512])
    for found, limit in ((posterior, sde2[-1]), (sde2[:-1], sde2[-1]), (churn[:-1], churn[-1])):
        errors = [float((x - limit).norm(dim=1).median()) for x in found]
        order = math.log(errors[0] / errors[-1]) / math.log(counts[-1] / counts[0])
        assert 0.8 < order < 1.5, errors
        assert errors[-1] < 0.03


def test_independent_noise_gives_other_samples_with_more_steps():
    method = BSI()
    predict = mixture().predictor(method)
    one, other = (
        sample(method, predict, SeededNoise(1, torch.arange(48), (2,), torch.float64), geometric_grid(method, k))
        for k in (128, 256)
    )
    assert (one - other).norm(dim=1).median() > 0.2


@pytest.mark.parametrize("noise", [BrownianPath, SeededNoise])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_drawn_sample_depends_on_the_seed_and_its_number_only(method, noise):
    """The noise is equal bit for bit; a network may round differently in another batch."""
    weight = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) / 4
    predict = lambda latent, level: torch.tanh(latent @ weight)  # noqa: E731
    grid = paper_grid(method, 9)
    whole = sample(method, predict, noise(7, torch.arange(20), (12,)), grid, "sde2")
    for part in (torch.arange(20).flip(0), torch.tensor([13]), torch.arange(5, 12)):
        found = sample(method, predict, noise(7, part, (12,)), grid, "sde2")
        torch.testing.assert_close(found, whole[part], rtol=0, atol=1e-5)
    other = sample(method, predict, noise(8, torch.arange(20), (12,)), grid, "sde2")
    assert (other - whole).abs().min(dim=1).values.max() > 1e-3


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_solvers_that_add_no_noise_draw_none(method):
    drawn = []

    def noise(start: float, end: float) -> Tensor:
        drawn.append((start, end))
        return path(count=3)(start, end)

    sample(method, Counting(), noise, geometric_grid(method, 6), "ode2")
    assert len(drawn) == (2 if isinstance(method, BFN) else 1)
    drawn.clear()
    sample(method, Counting(), noise, geometric_grid(method, 6), "posterior")
    assert len(drawn) == 7
    assert drawn[0][0] == 0
    assert [end for _, end in drawn[:-1]] == [start for start, _ in drawn[1:]]


@pytest.mark.parametrize("method", [*METHODS, BSI(gamma_0=0.1)], ids=repr)
def test_measurements_lead_from_belief_to_belief(method):
    """Lemma "Posterior Update", backwards: for every solver, a step equals a measurement."""
    for solver in SOLVERS:
        steps = list(trajectory(method, Counting(), path(count=4), geometric_grid(method, 6), solver))
        for before, after in itertools.pairwise(steps):
            y, alpha = measurement(method, before, after), after.level - before.level
            updated, expected = belief(method, before).update(y, alpha), belief(method, after)
            torch.testing.assert_close(updated.mean, expected.mean, rtol=1e-9, atol=1e-9)
            assert float(updated.precision) == pytest.approx(float(expected.precision), rel=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_belief_mean_is_the_latent_or_vdms_scaled_latent(method):
    for step in trajectory(method, Counting(), path(count=4), geometric_grid(method, 6), "posterior"):
        scale = method.encoder(step.level).signal if isinstance(method, VDM) else 1.0
        torch.testing.assert_close(scale * belief(method, step).mean, step.latent, rtol=1e-12, atol=1e-12)


def test_the_papers_measurements_scatter_around_the_prediction_with_the_precision_gained():
    method = BSI()
    grid = geometric_grid(method, 8)
    steps = list(trajectory(method, Counting(), path(count=4000), grid))
    for before, after in itertools.pairwise(steps):
        alpha = after.level - before.level
        scaled = (measurement(method, before, after) - before.x_hat) * alpha.sqrt()
        assert scaled.mean().abs() < 4 / math.sqrt(8000)
        assert (scaled.square().mean() - 1).abs() < 4 * math.sqrt(2 / 8000)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_trajectory_may_start_from_any_latent(method):
    predict, grid = mixture().predictor(method), geometric_grid(method, 12)
    steps = list(trajectory(method, predict, path(), grid, "posterior"))
    again = list(trajectory(method, predict, path(), grid[5:], "posterior", start=steps[5].latent))
    assert len(again) == 8
    torch.testing.assert_close(again[-1].x_hat, steps[-1].x_hat, rtol=1e-9, atol=1e-9)


def test_invalid_sampling_is_rejected_before_the_first_evaluation():
    method = BSI()

    def never(latent: Tensor, level: Tensor) -> Tensor:
        raise AssertionError("evaluated")

    grid = paper_grid(method, 4)
    for arguments, message in (((grid, "sde3"), "did you mean 'sde2'"), ((grid[1:], "sde2"), "starts at the prior")):
        with pytest.raises(UsageError, match=message):
            trajectory(method, never, path(), *arguments)

    def euler(method: Method, grid: Tensor) -> Table:  # of docs/own-solver.md, for BSI and VDM
        w, nothing = Path.of(method, grid), torch.zeros(len(grid) - 1, dtype=torch.float64)
        return Table(w.noise[1:] / w.noise[:-1], torch.diff(w.rho) * w.noise[1:], nothing, nothing)

    def shorter(method: Method, grid: Tensor) -> Table:
        return euler(method, grid[1:])

    with pytest.raises(
        UsageError, match=r"cannot take a step of BFN from level 1 to 31\..*: its coefficients are \[inf"
    ):
        trajectory(BFN(), never, path(), paper_grid(BFN(), 4), euler)
    with pytest.raises(UsageError, match=r"a row for each of the 4 steps: got \[3\] rows"):
        trajectory(method, never, path(), grid, shorter)


# Gradients


def test_gradients_are_kept_only_when_asked_for():
    """A graph of all evaluations takes many times the memory of sampling."""
    method, scale = BSI(), torch.ones(2, requires_grad=True)
    predict = lambda latent, level: torch.tanh(scale * latent)  # noqa: E731
    noise, grid = SeededNoise(0, torch.arange(3), (2,)), paper_grid(method, 3)
    y = torch.zeros(3, 2)
    for draw in (
        lambda **how: sample(method, predict, SeededNoise(0, torch.arange(3), (2,)), grid, **how),
        lambda **how: denoise(method, predict, noise, y, 10.0, 3, **how),
    ):
        assert not draw().requires_grad
        (gradient,) = torch.autograd.grad(draw(differentiable=True).sum(), scale)
        assert bool(gradient.abs().gt(0).all())
    known = inpainted(method, predict, y, torch.tensor([1.0, 0.0]).expand(3, 2))
    assert not sample(method, known, noise, grid).requires_grad
    assert torch.is_grad_enabled()


def test_iterating_a_trajectory_keeps_the_callers_gradient_mode():
    steps = trajectory(BSI(), lambda latent, level: latent, path(count=3), paper_grid(BSI(), 3))
    for _ in steps:
        assert torch.is_grad_enabled()
