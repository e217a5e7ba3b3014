"""Objectives other than the ELBO: L_M^k, and losses weighted over the level."""

import math
from dataclasses import replace

import pytest
import torch

import bsi
from bsi.backbones.config import MLPConfig
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.methods import BFN, BSI, VDM
from bsi.objective import edm_weight, expected_levels, finite_training_loss, sigmoid_weight, training_loss
from bsi.recipe import Every, Objective, Recipe, from_plain, to_plain
from bsi.runtime.distributed import Place, World
from bsi.training.step import Batch, Engine

METHODS = [bsi.BSI(), bsi.BFN(), bsi.VDM()]


def log_snr(method, level):
    encoder = method.encoder(level)
    return 2 * torch.log(encoder.signal / encoder.noise)


@pytest.mark.parametrize("method", METHODS)
def test_the_sigmoid_weight_is_one_half_where_ln_snr_is_the_bias(method):
    t = torch.linspace(1e-3, 1, 96, dtype=torch.float64)  # from where almost no information is gained
    level = method.levels.icdf(t)
    assert torch.allclose(sigmoid_weight(method, 3.0)(level), torch.sigmoid(3.0 - log_snr(method, level)), rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_edm_weight_is_that_of_its_noise_levels_and_loss(method):
    """EDM: ln sigma ~ N(-1.2, 1.2^2), loss (sigma^2 + s^2) / (sigma s)^2 |x - x_hat|^2; ELBO: snr for d ln snr."""
    level = method.levels.icdf(torch.linspace(0.1, 0.9, 33, dtype=torch.float64))
    l = log_snr(method, level)
    sigma, s = torch.exp(-l / 2), 0.5
    z = (torch.log(sigma) + 1.2) / 1.2
    density = torch.exp(-0.5 * z**2) / (1.2 * math.sqrt(2 * math.pi)) / 2  # of l = -2 ln sigma
    edm = density * (sigma**2 + s**2) / (sigma * s) ** 2
    ratio = edm / torch.exp(l) / edm_weight(method)(level)
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-9)
    assert math.isclose(float(ratio[0]), 1 / s**2, rel_tol=1e-6)
    ends = torch.tensor([method.levels.low, method.levels.high], dtype=torch.float64)
    for weight in (sigmoid_weight(method, 2.0), edm_weight(method)):
        assert bool(torch.isfinite(weight(ends)).all())


def engine(objective: Objective, spec=None) -> Engine:
    recipe = replace(bsi.recipes.digits(), method=spec or BSI(), objective=objective)
    torch.manual_seed(0)
    network = torch.nn.Conv2d(1, 1, 3, padding=1)
    network.forward = lambda x, t: torch.tanh(x)
    model = bsi.Model(network, recipe.method, (1, 8, 8), bsi.Bins(-1.0, 1.0, 17))
    return Engine(recipe, model, World(Place(), torch.device("cpu")), None)


def batch() -> Batch:
    torch.manual_seed(1)
    data = torch.randint(0, 17, (32, 1, 8, 8), dtype=torch.uint8)
    t = (torch.arange(32, dtype=torch.float64) / 32 + 0.3) % 1
    return Batch(data, t, torch.randn(32, 1, 8, 8))


@pytest.mark.parametrize("spec", [BSI(), BFN(), VDM()])
def test_the_trainer_can_minimize_the_finite_bound(spec):
    trainer, given = engine(Objective(finite_k=7), spec), batch()
    method = trainer.model.method
    i = torch.floor(given.t * 7).long()
    x = trainer.model.values(given.data)
    expected = finite_training_loss(method, trainer.model.denoiser, x, paper_grid(method, 7), i, given.eps)
    assert torch.equal(trainer._losses(given), expected)
    assert set(i.tolist()) == set(range(7))


def test_the_trainer_can_weight_levels():
    plain, given = engine(Objective()), batch()
    method, x = plain.model.method, plain.model.values(given.data)
    for objective, weight in (
        (Objective(weight="sigmoid", bias=1.0), sigmoid_weight(method, 1.0)),
        (Objective(weight="edm"), edm_weight(method)),
        (Objective(levels="expected"), None),
    ):
        drawn = expected_levels(method, weight)
        expected = training_loss(method, plain.model.denoiser, x, given.t, given.eps, weight, drawn)
        trainer = engine(objective)
        assert torch.equal(trainer._losses(given), expected)
        sums = trainer.loss.sums(torch.ones(32, requires_grad=True), given.t)
        assert not sums.requires_grad, "the reported losses hold no graph"


@pytest.mark.parametrize("name", ["elbo", "sigmoid", "edm"])
@pytest.mark.parametrize("method", METHODS)
def test_levels_drawn_in_proportion_to_the_loss_reduce_its_variance(method, name):
    """On Gaussian data, whose best guess is linear."""
    weight = {"elbo": None, "sigmoid": sigmoid_weight(method, 2.0), "edm": edm_weight(method)}[name]
    count, n, std = 4096, 48, 0.5
    noise = torch.randn(2, count, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, eps = std * noise[0], noise[1]
    t = (torch.arange(count, dtype=torch.float64) + 0.5) / count

    def best(latent, level):
        encoder = method.encoder(level)
        gain, spread = encoder.signal[:, None], encoder.noise[:, None]
        return gain * std**2 / (gain**2 * std**2 + spread**2) * latent

    even = training_loss(method, best, x, t, eps, weight)
    drawn = training_loss(method, best, x, t, eps, weight, expected_levels(method, weight))
    assert drawn.mean().item() == pytest.approx(even.mean().item(), rel=0.02)
    assert drawn.var() < (0.9 if weight is None else 0.5) * even.var()


@pytest.mark.parametrize("method", METHODS)
def test_edms_levels_are_normal_with_a_uniform_part_of_one_in_twenty(method):
    drawn = expected_levels(method, edm_weight(method))
    level = method.levels.icdf(torch.linspace(0.2, 0.9, 200, dtype=torch.float64))
    assert bool((drawn.density(level) > 0.0499 * method.levels.density(level)).all())
    excess = drawn.density(level) / method.levels.density(level) - 0.05
    normal = torch.exp(-0.5 * ((log_snr(method, level) - 2.4) / 2.4) ** 2)
    gain, c = method.gain(level), method.c
    slope = level * (gain + 2 * c) / (gain * (gain + c))  # of l along ln(level)
    ratio = (excess / normal / slope)[(normal > 0.01) & (gain > 20 * c)]
    assert len(ratio) > 50
    assert torch.allclose(ratio, ratio[-1].expand_as(ratio), rtol=0.01)


@pytest.mark.parametrize("weight", ["elbo", "sigmoid", "edm"])
def test_the_journal_has_the_unweighted_loss_in_bits(weight):
    weighed, given = engine(Objective(weight=weight)), batch()
    x, method = weighed.model.values(given.data), weighed.model.method
    plain = training_loss(method, weighed.model.denoiser, x, given.t, given.eps, None, weighed.loss.levels)
    plain = plain.sum() / weighed.recipe.batch
    sums = weighed.loss.sums(weighed._losses(given), given.t) / weighed.recipe.batch
    assert sums[-1].item() == pytest.approx(plain.item(), rel=1e-5)
    assert len(sums) == (1 if weight == "elbo" else 2)
    first = replace(given, t=torch.zeros_like(given.t))  # at zero information EDM's weight is 0
    assert bool(torch.isfinite(weighed.loss.sums(weighed._losses(first), first.t)).all())


def test_weighted_and_finite_runs_name_their_losses(tmp_path):
    """Without training (rate 1e-12) the bits in the journal are those of the unweighted objective."""
    small = replace(
        bsi.recipes.digits(), backbone=MLPConfig(width=16, depth=1), steps=3, batch=512, every=Every(journal=3)
    )
    small = replace(small, optimizer=replace(small.optimizer, lr=1e-12, final_lr=0.0))

    def last(name: str, **changes: object) -> dict:
        recipe = replace(small, **changes)
        return bsi.train(recipe, out=tmp_path / name, device="cpu").journal()[-1]

    plain = last("plain")
    for audit in (False, True):
        weighed = last(f"edm-{audit}", objective=Objective(weight="edm"), audit=audit)
        assert weighed["bits_per_dim"] == pytest.approx(plain["bits_per_dim"], rel=0.08)
        assert weighed["loss"] != pytest.approx(plain["loss"], rel=0.1)
    finite = last("finite", objective=Objective(finite_k=16))
    assert "bits_per_dim" not in finite
    assert finite["bits_per_dim_finite_k"] == pytest.approx(finite["loss"] / 2 / math.log(2))
    assert finite["bits_per_dim_finite_k"] > plain["bits_per_dim"]


def test_an_objective_is_part_of_the_recipe_and_of_its_record():
    recipe = replace(bsi.recipes.digits(), objective=Objective(finite_k=16))
    assert from_plain(Recipe, to_plain(recipe)) == recipe
    without = {name: value for name, value in to_plain(bsi.recipes.digits()).items() if name != "objective"}
    assert from_plain(Recipe, without) == bsi.recipes.digits()  # records written before the option existed


def test_the_default_levels_depend_on_the_weight():
    assert not Objective().expected_levels
    assert Objective(weight="edm").expected_levels
    requested = engine(Objective(weight="edm", levels="paper"))
    assert requested.loss.levels == requested.model.method.levels
    assert engine(Objective(levels="expected")).loss.levels != requested.loss.levels


def test_a_weighted_finite_bound_is_rejected():
    for match, given in (
        ("finite_k=4", {"finite_k": 4, "weight": "edm"}),
        ("levels=expected, finite_k=4", {"finite_k": 4, "levels": "expected"}),
        ("at least 1, got 0", {"finite_k": 0}),
    ):
        with pytest.raises(UsageError, match=match):
            Objective(**given)
