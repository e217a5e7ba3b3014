"""Invalid input is a ValueError that names the problem, the value and the fix. Nothing is clamped silently.

The checks of shapes that pytest switches on are switched off here, as they are for users.
"""

import math
from dataclasses import replace

import jaxtyping
import pytest
import torch

import bsi
from bsi.backbones import build
from bsi.denoiser import Denoiser
from bsi.elbo import finite_measurement_loss, measurement_loss, reconstruction_loss
from bsi.errors import BsiError, DataError, NonFinite, UsageError
from bsi.formulations import euler_maruyama_step, noising
from bsi.gaussian import Belief
from bsi.grids import GRIDS, check_grid, named_grid, paper_grid
from bsi.levels import ExpectedError, Fitted, LogUniform, Uniform, low_discrepancy
from bsi.likelihood import categorical_normal, discretized_normal, normal
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


def narrow(latent, level):
    return latent[:, :1]


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def at(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def noise(start: float, end: float) -> torch.Tensor:
    return zeros(2, 3)


def model(data=None, shape=(2,), network=None) -> bsi.Model:
    return bsi.Model(Identity() if network is None else network, bsi.BSI(), shape, data)


def rejected(call, *fragments: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the fragments are the match
        call()
    assert isinstance(caught.value, BsiError)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)


# Methods and mathematics


def test_a_belief_prior_broader_than_the_belief_is_rejected():
    rejected(lambda: bsi.BSI(gamma_0=1e-3), "gamma_0", "0.001", "lambda_0=0.01", "Use gamma_0=lambda_0")
    rejected(lambda: bsi.BSI(gamma_0=NAN), "gamma_0", "nan")
    bsi.BSI(gamma_0=1e-2)
    bsi.BSI(gamma_0=INF)


@pytest.mark.parametrize(
    ("make", "values", "hint"),
    [
        *[(lambda v, name=name: bsi.BSI(**{name: v}), (0.0, -1.0, INF, NAN), name)
          for name in ("lambda_0", "alpha_M", "alpha_R")],
        (lambda v: bsi.BFN(sigma_1=v), (0.0, -1e-3, 1.0, 2.0, NAN), "sigma_1"),
        (lambda v: bsi.VDM(nu_min=v), (0.0, -1.0, 1e6, NAN), "e^13.3"),
        (lambda v: bsi.VDM(nu_max=v), (1e-3, INF, NAN), "nu_max"),
        (lambda v: Belief(zeros(2, 3), at(v)), (0.0, -1.0, NAN), "precision"),
        (lambda v: Belief(zeros(2, 3), at(1.0)).update(zeros(2, 3), at(v)), (0.0, -1.0, NAN), "measurement"),
        (churn, (-0.5, INF), "churn"),
        (lambda v: Denoiser(Identity(), bsi.BSI(), sigma_data=v), (0.0, -1.0), "sigma_data"),
        (lambda v: ExpectedError(1.0, 2.0, offset=v), (-1.0,), "offset"),
    ],
)  # fmt: skip
def test_a_parameter_out_of_its_range_is_rejected(make, values, hint):
    for value in values:
        rejected(lambda value=value: make(value), hint, str(value))


@pytest.mark.parametrize("make", [LogUniform, Uniform, lambda *e: ExpectedError(*e, 0.0), lambda *e: Fitted(*e, (1,))])
def test_proposals_over_an_impossible_range_are_rejected(make):
    for low, high in ((0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, INF), (NAN, 1.0)):
        rejected(lambda low=low, high=high: make(low, high), f"low={low}", f"high={high}")


def test_proposals_without_a_density_are_rejected():
    for weights in ((), (1.0, 0.0), (1.0, -2.0), (NAN,)):
        rejected(lambda weights=weights: Fitted(1.0, 2.0, weights), "weights", str(weights))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_proposal_over_other_levels_than_the_methods_is_rejected(method):
    low, high = method.levels.low, method.levels.high
    for proposal in (LogUniform(low / 2, high), LogUniform(low, high / 2)):
        rejected(
            lambda proposal=proposal: measurement_loss(
                method, predict, zeros(2, 3), at(0.1, 0.2), zeros(2, 3), proposal
            ),
            "proposal", str(proposal.low), "biased",
        )  # fmt: skip


def test_unknown_names_are_rejected_with_the_nearest():
    rejected(lambda: named_solver("posteriour"), "did you mean 'posterior'", "ode2")
    rejected(lambda: named_grid("papr"), "paper", "geometric")
    rejected(lambda: Denoiser(Identity(), bsi.BSI(), "noise"), "noise", "epsilon")
    for name in ("churn:much", "churn:-1", "churn:"):
        rejected(lambda name=name: named_solver(name), f"got {name!r}")


def test_a_mixture_of_mismatched_parts_is_rejected():
    rejected(lambda: Mixture(at(1.0), zeros(2, 3), zeros(2, 3)), "weights (1,)")
    rejected(lambda: Mixture(at(1.0, 0.0), zeros(2, 3), zeros(2, 3)), "positive weights")
    rejected(lambda: Mixture(at(1.0, 1.0), zeros(2, 3), zeros(2, 3) - 1), "non-negative variances")


def test_noising_towards_less_noise_and_negative_steps_raise():
    method, mu = bsi.BSI(), zeros(1, 1)
    for sharp, level in ((1.0, 1.0), (1.0, 2.0), (1.0, 0.001)):
        rejected(lambda sharp=sharp, level=level: noising(method, mu, mu, at(sharp), at(level)), "sharper")
    for alpha, level in ((0.0, 0.1), (-1.0, 0.1), (1.0, -0.1)):
        step = lambda alpha=alpha, level=level: euler_maruyama_step(  # noqa: E731
            method, at(2.0), mu, mu, at(alpha), at(level), mu
        )
        rejected(step, str(alpha), str(level))


@pytest.mark.parametrize("decoder", [discretized_normal, categorical_normal])
def test_decoders_reject_impossible_precisions(decoder):
    bins, index = bsi.Bins.uint8(), torch.zeros(2, 3, dtype=torch.int64)
    for precision in (0.0, -1.0, INF, NAN):
        rejected(lambda p=precision: decoder(bins, index, zeros(2, 3), p), "precision", str(precision))
        rejected(lambda p=precision: normal(zeros(2, 3), zeros(2, 3), p), "precision", str(precision))
    rejected(lambda: decoder(bins, index, zeros(2, 1), 1.0), "(2, 3)", "(2, 1)")
    rejected(lambda: normal(zeros(2, 3), zeros(2, 1), 1.0), "(2, 3)", "(2, 1)")


# Grids


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_schedule_that_does_not_rise_from_the_prior_within_the_range_is_rejected(method):
    low, high = method.levels.low, method.levels.high
    middle, i = 0.5 * (low + high), torch.zeros(2, dtype=torch.int64)
    for levels, fragment in (
        ([], "at least two"),
        ([low], "at least two"),
        ([high, low], "rise strictly"),
        ([low, middle, 0.9 * middle, high], "rise strictly: level 2"),
        ([low, middle, middle, high], "rise strictly: level 2"),
        ([low, NAN, high], "rise strictly: level 1 is nan"),
        ([low, high, high * (1 + 1e-7)], "rise strictly"),
        ([2 * low, high], "starts at the prior"),
        ([low / 2, high], "in range"),
        ([low, 2 * high, high], "in range"),
    ):
        rejected(lambda levels=levels: check_grid(method, levels), fragment)
        rejected(lambda levels=levels: sample(method, predict, noise, at(*levels)), fragment)
        loss = lambda levels=levels: finite_measurement_loss(  # noqa: E731
            method, predict, zeros(2, 3), at(*levels), i, zeros(2, 3)
        )
        rejected(loss, fragment)
    for grid in GRIDS.values():
        rejected(lambda grid=grid: grid(method, 0), "at least one step", "k=0")


def test_the_schedule_of_a_bound_must_reach_the_reconstruction():
    grid, i = at(0.01, 1.0, 100.0), torch.zeros(2, dtype=torch.int64)
    loss = lambda: finite_measurement_loss(bsi.BSI(), predict, zeros(2, 3), grid, i, zeros(2, 3))  # noqa: E731
    rejected(loss, "100.0", "1000000.01")
    sample(bsi.BSI(), predict, noise, grid)  # sampling may end before the last level


# Shapes


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_mismatched_shapes_are_rejected_and_never_broadcast(method):
    x, eps, t, grid = zeros(2, 3), zeros(2, 3), at(0.1, 0.2), paper_grid(method, 4)
    i = torch.zeros(2, dtype=torch.int64)
    rejected(lambda: training_loss(method, predict, x, t, zeros(2, 1)), "(2, 3)", "(2, 1)")
    rejected(lambda: training_loss(method, predict, x, at(0.1), eps), "levels (1,)")
    rejected(lambda: finite_measurement_loss(method, predict, x, grid, i[:1], eps), "levels (1,)")
    rejected(lambda: finite_measurement_loss(method, predict, x, grid, i, zeros(1, 3)), "(1, 3)")
    rejected(lambda: reconstruction_loss(method, predict, x, zeros(2, 1), CONTINUOUS), "(2, 1)")
    rejected(lambda: training_loss(method, narrow, x, t, eps), "prediction", "(2, 1)", "(2, 3)")
    if not isinstance(method, bsi.VDM):
        rejected(lambda: reconstruction_loss(method, narrow, x, eps, CONTINUOUS), "prediction", "(2, 1)")
    rejected(lambda: Belief(x, at(1.0)).update(zeros(2, 1), at(1.0)), "(2, 1)", "(2, 3)")


def test_data_and_predictions_of_another_shape_than_the_models_are_rejected():
    for shape in ((4, 2, 3), (4, 6), (3, 2), (4, 3, 2, 1)):
        rejected(lambda shape=shape: model(shape=(3, 2))(torch.zeros(shape)), "(batch, 3, 2)", str(shape))
    network = Identity()
    network.forward = narrow
    rejected(lambda: model(shape=(3,), network=network)(torch.zeros(2, 3)), "backbone", "(2, 1)", "(2, 3)")


def test_a_condition_is_a_tensor_with_a_row_for_each_sample():
    for rows in (1, 3, 5):
        cond = {"label": torch.zeros(rows)}
        rejected(lambda cond=cond: model().sample(4, cond=cond), f"{rows} rows", "label", "4 samples")
        rejected(lambda cond=cond: model().elbo(torch.zeros(4, 2), cond), f"{rows} rows")
        rejected(lambda cond=cond: model()(torch.zeros(4, 2), cond["label"]), f"{rows} rows")
    for cond in ([0, 1], "ca", {"label": [0, 1]}):
        rejected(lambda cond=cond: model().sample(2, cond=cond), "must be a torch.Tensor", "torch.tensor([0, 1")
    rejected(lambda: model().sample(2, cond=torch.tensor(1)), "one row per sample", "cond.expand(2)")


def test_labels_that_a_network_does_not_have_are_rejected():
    labeled = model(network=build("mlp-8x1", shape=(2,), num_classes=2))
    for label in (-1, 3):
        rejected(lambda label=label: labeled.sample(2, cond=torch.tensor([0, label])), "labels 0 to 1", f"got {label}")
    assert labeled.sample(2, steps=2, cond=torch.tensor([1, 2])).shape == (2, 2), "2 stands for none"


# Data


def test_data_outside_its_bins_is_rejected():
    binned = model(bsi.Bins(-1.0, 1.0, 17))
    for bad in ([[0, 17]], [[-1, 3]], [[300, 0]]):
        data = torch.tensor(bad)
        for call in (binned, binned.elbo):
            rejected(lambda call=call, data=data: call(data), "outside its bins", str(int(data.max())), "0 to 16")
    rejected(lambda: binned(torch.tensor([[0.0, 1.5]])), "outside its bins", "1.5", "-1 to 1", "bin indices")
    rejected(lambda: binned(torch.tensor([[12.0, 16.0]])), "12 to 16")
    rejected(lambda: model()(torch.tensor([[1, 2]])), "bins", "int64", "Bins.uint8()")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("bins", [None, bsi.Bins.uint8()], ids=repr)
def test_data_that_is_not_finite_is_rejected(bins, value):
    data = torch.tensor([[0.0, 0.5], [value, 0.1], [0.2, value]])
    for call in (model(bins), model(bins).elbo):
        with pytest.raises(DataError, match="2 of 3 samples"):
            call(data)
    with pytest.raises(DataError, match="1 of 2 samples"):
        model(bins, shape=())(torch.tensor([value, 0.1]))


def test_nonfinite_samples_raise():
    network = Identity()
    network.forward = lambda mu, t: mu / 0
    with pytest.raises(NonFinite, match="3 of 3 samples"):
        model(bsi.Bins.uint8(), network=network).sample(3, steps=2)


def test_impossible_bins_and_units_are_rejected():
    for arguments in ((0.0, 1.0, 1), (0.0, 1.0, 65537), (1.0, 0.0, 4), (0.0, 0.0, 4), (0.0, INF, 4), (NAN, 1.0, 4)):
        low, _, count = arguments
        rejected(lambda arguments=arguments: bsi.Bins(*arguments), f"count={count}", f"low={low}", "Bins.uint8()")
    for mean, std in ((0.0, 0.0), (0.0, -1.0), (NAN, 1.0), (0.0, INF)):
        rejected(lambda mean=mean, std=std: bsi.Standardize(mean, std), f"std={std}", f"mean={mean}")


def test_empty_batches_are_rejected():
    rejected(lambda: low_discrepancy(0, 0.5), "at least one", "0")
    for kind in (None, bsi.Bins.uint8()):
        for call in (model(kind), model(kind).elbo):
            rejected(lambda call=call: call(torch.zeros(0, 2)), "at least one sample")
    for wrong in ({"recon": 0}, {"measure": 0}):
        rejected(lambda wrong=wrong: model().elbo(torch.zeros(3, 2), **wrong), f"{next(iter(wrong))}=0")
    rejected(lambda: model().sample(0), "num=0")
    rejected(lambda: model().sample(2, batch_size=0), "batch_size=0")


# Frequent mistakes


def test_data_that_is_no_tensor_raises_with_the_conversion():
    for call in (model(), model().elbo, model().values, model().check):
        rejected(lambda call=call: call([[0.0, 1.0]]), "got a list", "torch.as_tensor(data)")


def test_a_class_or_a_name_in_place_of_an_object_raises_with_the_call():
    rejected(lambda: bsi.Model(Identity(), bsi.BFN, (2,)), "got BFN. Pass BFN().")
    rejected(lambda: bsi.Model(Identity(), "bsi", (2,)), "'bsi'", "bsi.BSI()")
    rejected(lambda: model(network=Identity), "got Identity. Pass Identity(...).")
    rejected(lambda: model(network="dit-s/2"), "'dit-s/2'", "bsi.backbones.build")
    rejected(lambda: bsi.train("cifar10-dit-s"), "got 'cifar10-dit-s'", "bsi.recipes.digits()")
    rejected(lambda: bsi.train(bsi.recipes.digits), "bsi.recipes.digits()")
    rejected(lambda: bsi.train(None), "got None", "bsi.recipes.digits()")


def test_a_network_without_the_argument_t_raises_with_the_arguments():
    class Timeless(torch.nn.Module):
        def forward(self, mu):
            return mu

    class Conditioned(torch.nn.Module):
        def forward(self, mu, t, cond):
            return mu

    message = ("network(input, t)", "got Timeless, whose forward is (mu)", "forward(self, input, t)")
    rejected(lambda: model(network=Timeless()), *message)
    rejected(lambda: model(network=torch.nn.Sequential(Timeless())), "got Sequential")
    for network in (Identity(), Conditioned(), torch.nn.DataParallel(Identity()), torch.compile(Identity())):
        model(network=network)


def test_a_wrong_sampler_is_rejected_before_the_first_evaluation():
    class Never(torch.nn.Module):
        def forward(self, mu, t):
            raise AssertionError("evaluated")

    for wrong in ({"guidance": NAN}, {"guidance": -1.0}, {"steps": 0}, {"noise": "white"}, {"variance": "cosine"}):
        rejected(lambda wrong=wrong: replace(bsi.Sampler(), **wrong), *wrong)
    rejected(lambda: model(network=Never()).sample(1, steps=9000, solver="sde2"), "fewer steps")
    rejected(lambda: model(network=Never()).sample(1, solver="sde3"), "did you mean 'sde2'")
    with pytest.raises(TypeError, match="stpes"):
        model().sample(1, stpes=4)


def test_usage_errors_have_exit_code_2():
    assert (UsageError.code, DataError.code, NonFinite.code) == (2, 3, 5)
