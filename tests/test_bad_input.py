"""What cannot mean anything is a ValueError that says what, what it got, and the fix. Nothing is clamped silently.

The checks of shapes that pytest switches on are switched off here: what is tested is what a user meets.
"""

import math

import jaxtyping
import pytest
import torch

import bsi
from bsi.backbones import build
from bsi.denoiser import Denoiser
from bsi.elbo import finite_measurement_loss, measurement_loss, reconstruction_loss
from bsi.errors import BsiError, DataError, NonFinite, UsageError
from bsi.gaussian import Belief
from bsi.grids import named_grid, paper_grid
from bsi.interpolant import euler_maruyama_step
from bsi.levels import ExpectedError, Fitted, LogUniform, Uniform, low_discrepancy
from bsi.likelihood import categorical_normal, discretized_normal, normal
from bsi.noising import noising
from bsi.objective import training_loss
from bsi.oracle import Mixture
from bsi.sampling import sample
from bsi.solvers import churn, named_solver
from bsi.values import CONTINUOUS

METHODS = [bsi.BSI(), bsi.BFN(), bsi.VDM()]
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def as_a_user():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Identity(torch.nn.Module):
    def forward(self, mu, t, cond=None):
        return mu


def predict(latent, level):
    return latent


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def noise(start: float, end: float) -> torch.Tensor:
    return zeros(2, 3)


def refused(call, *fragments: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the fragments are the match
        call()
    assert isinstance(caught.value, BsiError)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


# Methods


def test_a_belief_prior_broader_than_the_belief_is_refused():
    refused(lambda: bsi.BSI(gamma_0=1e-3), "gamma_0", "0.001", "lambda_0=0.01", "Use gamma_0=lambda_0")
    refused(lambda: bsi.BSI(gamma_0=NAN), "gamma_0", "nan")
    bsi.BSI(gamma_0=1e-2)
    bsi.BSI(gamma_0=INF)


@pytest.mark.parametrize("value", [0.0, -1.0, INF, NAN])
@pytest.mark.parametrize("name", ["lambda_0", "alpha_M", "alpha_R"])
def test_precisions_that_are_not_positive_and_finite_are_refused(name, value):
    refused(lambda: bsi.BSI(**{name: value}), name, str(value), "1e-2")


@pytest.mark.parametrize("value", [0.0, -1e-3, 1.0, 2.0, NAN])
def test_a_last_deviation_outside_0_to_1_is_refused(value):
    refused(lambda: bsi.BFN(sigma_1=value), "sigma_1", str(value), "1e-3")


@pytest.mark.parametrize("ends", [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, INF), (NAN, 1.0)])
def test_signal_to_noise_ratios_that_do_not_rise_are_refused(ends):
    refused(lambda: bsi.VDM(*ends), "nu_min", str(ends[0]), str(ends[1]), "e^13.3")


# Beliefs, levels, grids


def test_beliefs_and_measurements_need_positive_precisions_and_one_shape():
    belief = Belief(zeros(2, 3), at(1.0))
    for value in (0.0, -1.0, NAN):
        refused(lambda value=value: Belief(zeros(2, 3), at(value)), "precision", str(value))
        refused(lambda value=value: belief.update(zeros(2, 3), at(value)), "measurement", str(value))
    refused(lambda: belief.update(zeros(2, 1), at(1.0)), "(2, 1)", "(2, 3)")


@pytest.mark.parametrize(
    "make", [LogUniform, Uniform, lambda *e: ExpectedError(*e, 0.0), lambda *e: Fitted(*e, (1.0,))]
)
@pytest.mark.parametrize("ends", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, INF), (NAN, 1.0)])
def test_proposals_over_an_impossible_range_are_refused(make, ends):
    refused(lambda: make(*ends), f"low={ends[0]}", f"high={ends[1]}")


def test_proposals_with_impossible_shapes_are_refused():
    refused(lambda: ExpectedError(1.0, 2.0, offset=-1.0), "offset", "-1.0")
    for weights in ((), (1.0, 0.0), (1.0, -2.0), (NAN,)):
        refused(lambda weights=weights: Fitted(1.0, 2.0, weights), "weights", str(weights))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_proposal_over_other_levels_than_the_methods_is_refused(method):
    for low, high in ((method.levels.low / 2, method.levels.high), (method.levels.low, method.levels.high / 2)):
        call = lambda low=low, high=high: measurement_loss(  # noqa: E731
            method, predict, zeros(2, 3), at(0.1, 0.2), zeros(2, 3), LogUniform(low, high)
        )
        refused(call, "proposal", str(low), "biased")


def test_an_empty_batch_has_no_levels():
    refused(lambda: low_discrepancy(0, 0.5), "at least one", "0")
    refused(lambda: bsi.Model(Identity(), bsi.BSI(), (3,))(torch.zeros(0, 3)), "at least one")
    refused(lambda: bsi.Model(Identity(), bsi.BSI(), (3,), bsi.Bins.uint8())(torch.zeros(0, 3)), "at least one")


@pytest.mark.parametrize("grid", ["paper", "edm", "geometric"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_steps_at_all_are_refused(method, grid):
    for k in (0, -1):
        refused(lambda k=k: named_grid(grid)(method, k), "at least one step", f"k={k}")
    refused(lambda: bsi.Model(Identity(), method, (3,)).sample(2, steps=0, grid=grid), "steps=0")


def bad_schedules(method) -> list[tuple[torch.Tensor, str]]:
    low, high = method.levels.low, method.levels.high
    middle = 0.5 * (low + high)
    return [
        (at(), "at least two"),
        (at(low), "at least two"),
        (at(high, low), "rise strictly"),
        (at(low, middle, 0.9 * middle, high), "rise strictly"),
        (at(low, middle, middle, high), "rise strictly"),
        (at(low, NAN, high), "rise strictly"),
        (at(2 * low, high), "starts at the prior"),
        (at(low, 2 * high), "in range"),
    ]


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_empty_unsorted_and_foreign_schedules_are_refused(method, case):
    grid, fragment = bad_schedules(method)[case]
    refused(lambda: sample(method, predict, noise, grid), fragment)
    i = torch.zeros(2, dtype=torch.int64)
    refused(lambda: finite_measurement_loss(method, predict, zeros(2, 3), grid, i, zeros(2, 3)), fragment)


def test_the_schedule_of_a_bound_must_reach_the_reconstruction():
    grid, i = at(0.01, 1.0, 100.0), torch.zeros(2, dtype=torch.int64)
    refused(
        lambda: finite_measurement_loss(bsi.BSI(), predict, zeros(2, 3), grid, i, zeros(2, 3)), "100.0", "1000000.01"
    )
    sample(bsi.BSI(), predict, noise, grid)  # sampling may stop early


def test_unknown_names_are_refused_with_the_nearest():
    refused(lambda: named_solver("ode"), "ode2", "posterior")
    refused(lambda: named_grid("papr"), "paper", "geometric")
    refused(lambda: churn(-0.5), "-0.5")
    refused(lambda: Denoiser(Identity(), bsi.BSI(), "noise"), "noise", "epsilon")
    refused(lambda: Denoiser(Identity(), bsi.BSI(), sigma_data=0.0), "sigma_data", "0.0")


# Shapes


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mismatched_shapes_are_refused_and_never_broadcast(method):
    x, eps, t, grid = zeros(2, 3), zeros(2, 3), at(0.1, 0.2), paper_grid(method, 4)
    i = torch.zeros(2, dtype=torch.int64)
    refused(lambda: training_loss(method, predict, x, t, zeros(2, 1)), "(2, 3)", "(2, 1)")
    refused(lambda: training_loss(method, predict, x, at(0.1), eps), "levels (1,)")
    refused(lambda: training_loss(method, predict, x, at(0.1, 0.2, 0.3), eps), "levels (3,)")
    refused(lambda: finite_measurement_loss(method, predict, x, grid, i[:1], eps), "levels (1,)")
    refused(lambda: finite_measurement_loss(method, predict, x, grid, i, zeros(1, 3)), "(1, 3)")
    refused(lambda: reconstruction_loss(method, predict, x, zeros(2, 1), CONTINUOUS), "(2, 1)")
    narrow = lambda latent, level: latent[:, :1]  # noqa: E731
    refused(lambda: training_loss(method, narrow, x, t, eps), "prediction", "(2, 1)", "(2, 3)")
    if not isinstance(method, bsi.VDM):
        refused(lambda: reconstruction_loss(method, narrow, x, eps, CONTINUOUS), "prediction", "(2, 1)")


def test_a_network_that_changes_the_shape_is_refused():
    class Narrow(torch.nn.Module):
        def forward(self, mu, t):
            return mu[:, :1]

    refused(lambda: bsi.Model(Narrow(), bsi.BSI(), (3,))(torch.zeros(2, 3)), "backbone", "(2, 1)", "(2, 3)")


def test_data_of_another_shape_than_the_models_is_refused():
    model = bsi.Model(Identity(), bsi.BSI(), (3, 2))
    for shape in ((4, 2, 3), (4, 6), (3, 2), (4, 3, 2, 1)):
        refused(lambda shape=shape: model(torch.zeros(shape)), "(batch, 3, 2)", str(shape))


def test_a_condition_with_other_rows_than_samples_is_refused():
    model = bsi.Model(Identity(), bsi.BSI(), (3,))
    for rows in (1, 3, 5):
        cond = {"label": torch.zeros(rows)}
        refused(lambda cond=cond: model.sample(4, cond=cond), f"{rows} rows", "label", "4 samples")
        refused(lambda cond=cond: model.elbo(torch.zeros(4, 3), cond), f"{rows} rows")
        refused(lambda cond=cond: model(torch.zeros(4, 3), cond["label"]), f"{rows} rows")


def test_a_condition_that_is_no_tensor_is_told_how_to_become_one():
    model = bsi.Model(Identity(), bsi.BSI(), (3,))
    for cond in ([0, 1], "ca", {"label": [0, 1]}):
        refused(lambda cond=cond: model.sample(2, cond=cond), "must be a torch.Tensor", "torch.tensor([0, 1")
    refused(lambda: model.sample(2, cond=torch.tensor(1)), "one row per sample", "cond.expand(2)")


def test_labels_that_a_network_does_not_know_are_refused():
    model = bsi.Model(build("mlp-8x1", shape=(3,), num_classes=2), bsi.BSI(), (3,))
    for label in (-1, 3):
        refused(lambda label=label: model.sample(2, cond=torch.tensor([0, label])), "labels 0 to 1", f"got {label}")
    assert model.sample(2, steps=2, cond=torch.tensor([1, 2])).shape == (2, 3), "2 stands for none"


def test_a_mixture_of_mismatched_parts_is_refused():
    refused(lambda: Mixture(at(1.0), zeros(2, 3), zeros(2, 3)), "weights (1,)")
    refused(lambda: Mixture(at(1.0, 0.0), zeros(2, 3), zeros(2, 3)), "positive weights")
    refused(lambda: Mixture(at(1.0, 1.0), zeros(2, 3), zeros(2, 3) - 1), "non-negative variances")


# Data


def test_data_outside_its_bins_is_refused():
    model = bsi.Model(Identity(), bsi.BSI(), (2,), bsi.Bins(-1.0, 1.0, 17))
    for bad in ([[0, 17]], [[-1, 3]], [[300, 0]]):
        data = torch.tensor(bad)
        refused(lambda data=data: model(data), "outside its bins", str(int(data.max())), "0 to 16")
        refused(lambda data=data: model.elbo(data), "outside its bins")
    refused(lambda: model(torch.tensor([[0.0, 1.5]])), "outside its bins", "1.5", "-1 to 1", "bin indices")
    refused(lambda: model(torch.tensor([[12.0, 16.0]])), "12 to 16")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("bins", [None, bsi.Bins.uint8()], ids=repr)
def test_data_that_is_not_finite_is_refused(bins, value):
    model = bsi.Model(Identity(), bsi.BSI(), (2,), bins)
    data = torch.tensor([[0.0, 0.5], [value, 0.1], [0.2, value]])
    for call in (model, model.elbo):
        with pytest.raises(DataError, match="2 of 3 samples"):
            call(data)


def test_integers_without_bins_are_refused():
    refused(lambda: bsi.Model(Identity(), bsi.BSI(), (2,))(torch.tensor([[1, 2]])), "bins", "int64", "Bins.uint8()")


def test_samples_that_are_not_finite_are_an_error_and_not_black_pixels():
    class Broken(torch.nn.Module):
        def forward(self, mu, t):
            return mu / 0

    with pytest.raises(NonFinite, match="3 of 3 samples"):
        bsi.Model(Broken(), bsi.BSI(), (2,), bsi.Bins.uint8()).sample(3, steps=2)


@pytest.mark.parametrize("arguments", [(0.0, 1.0, 1), (1.0, 0.0, 4), (0.0, 0.0, 4), (0.0, INF, 4), (NAN, 1.0, 4)])
def test_impossible_bins_are_refused(arguments):
    refused(lambda: bsi.Bins(*arguments), f"count={arguments[2]}", f"low={arguments[0]}", "Bins.uint8()")


def test_impossible_units_are_refused():
    for mean, std in ((0.0, 0.0), (0.0, -1.0), (NAN, 1.0), (0.0, INF)):
        refused(lambda mean=mean, std=std: bsi.Standardize(mean, std), f"std={std}", f"mean={mean}")
    refused(lambda: bsi.Standardize.fit(torch.full((4, 2), 3.0)), "constant")


@pytest.mark.parametrize("decoder", [discretized_normal, categorical_normal])
def test_decoders_refuse_impossible_precisions_and_shapes(decoder):
    bins, index = bsi.Bins.uint8(), torch.zeros(2, 3, dtype=torch.int64)
    for precision in (0.0, -1.0, INF, NAN):
        refused(lambda p=precision: decoder(bins, index, zeros(2, 3), p), "precision", str(precision))
        refused(lambda p=precision: normal(zeros(2, 3), zeros(2, 3), p), "precision", str(precision))
    refused(lambda: decoder(bins, index, zeros(2, 1), 1.0), "(2, 3)", "(2, 1)")
    refused(lambda: normal(zeros(2, 3), zeros(2, 1), 1.0), "(2, 3)", "(2, 1)")


# What a newcomer passes


def test_data_that_is_no_tensor_is_told_how_to_become_one():
    model = bsi.Model(Identity(), bsi.BSI(), (2,))
    for call in (model, model.elbo, model.values, model.check, model.bits_per_dim):
        refused(lambda call=call: call([[0.0, 1.0]]), "got a list", "torch.as_tensor(data)")


def test_a_class_in_place_of_an_object_is_told_to_be_called():
    refused(lambda: bsi.Model(Identity(), bsi.BFN, (2,)), "got BFN. Pass BFN().")
    refused(lambda: bsi.Model(Identity(), "bsi", (2,)), "'bsi'", "bsi.BSI()")
    refused(lambda: bsi.Model(Identity, bsi.BSI(), (2,)), "got Identity. Pass Identity(...).")
    refused(lambda: bsi.Model("dit-s/2", bsi.BSI(), (2,)), "'dit-s/2'", "bsi.backbones.build")


def test_a_network_that_takes_no_t_is_told_what_it_will_be_given():
    class Timeless(torch.nn.Module):
        def forward(self, mu):
            return mu

    class Conditioned(torch.nn.Module):
        def forward(self, mu, t, cond):
            return mu

    message = ("network(input, t)", "got Timeless, whose forward is (mu)", "forward(self, input, t)")
    refused(lambda: bsi.Model(Timeless(), bsi.BSI(), (2,)), *message)
    refused(lambda: bsi.Model(torch.nn.Sequential(Timeless()), bsi.BSI(), (2,)), "got Sequential")
    for network in (Identity(), Conditioned(), torch.nn.DataParallel(Identity()), torch.compile(Identity())):
        bsi.Model(network, bsi.BSI(), (2,))


def test_a_recipe_by_name_is_told_as_a_call():
    refused(lambda: bsi.train("cifar10-dit-s"), "got 'cifar10-dit-s'", "bsi.recipes.cifar10_dit_s()")
    refused(lambda: bsi.train(bsi.recipes.digits), "bsi.recipes.digits()")
    refused(lambda: bsi.train(None), "got None", "bsi.recipes.digits()")


# Bounds and samples


def test_bounds_of_nothing_are_refused():
    model = bsi.Model(Identity(), bsi.BSI(), (2,))
    refused(lambda: model.elbo(torch.zeros(0, 2)), "at least one sample")
    refused(lambda: model.elbo(torch.zeros(3, 2), recon=0), "recon=0")
    refused(lambda: model.elbo(torch.zeros(3, 2), measure=0), "measure=0")


def test_samples_of_nothing_are_refused():
    model = bsi.Model(Identity(), bsi.BSI(), (2,))
    refused(lambda: model.sample(0), "num=0")
    refused(lambda: model.sample(2, batch_size=0), "batch_size=0")


def test_noising_refuses_to_sharpen():
    method, mu = bsi.BSI(), zeros(1, 1)
    for sharp, level in ((1.0, 1.0), (1.0, 2.0), (1.0, 0.001)):
        refused(lambda sharp=sharp, level=level: noising(method, mu, mu, at(sharp), at(level)), "sharper")


def test_an_interpolant_refuses_negative_steps_and_noise():
    method, mu = bsi.BSI(), zeros(1, 1)
    for alpha, level in ((0.0, 0.1), (-1.0, 0.1), (1.0, -0.1)):
        step = lambda alpha=alpha, level=level: euler_maruyama_step(  # noqa: E731
            method, at(2.0), mu, mu, at(alpha), at(level), mu
        )
        refused(step, str(alpha), str(level))


def test_usage_errors_carry_the_exit_code_of_usage():
    assert (UsageError.code, DataError.code, NonFinite.code) == (2, 3, 5)
    assert issubclass(UsageError, ValueError)
    assert issubclass(DataError, ValueError)
