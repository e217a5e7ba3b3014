"""What the studies train beside the paper's loss: L_M^k, and losses weighed over the level."""

import math
from dataclasses import replace

import pytest
import torch

import bsi
from bsi.backbones.config import MLPConfig
from bsi.errors import UsageError
from bsi.grids import paper_grid
from bsi.objective import edm_weight, finite_training_loss, sigmoid_weight, training_loss
from bsi.training.dataset import build_method
from bsi.training.distributed import Place, World
from bsi.training.journal import read_journal
from bsi.training.method_specs import BFNSpec, BSISpec, VDMSpec
from bsi.training.plain import from_plain, to_plain
from bsi.training.recipe import Every, Objective, Recipe
from bsi.training.step import Engine
from bsi.training.stream import Batch, Piece

METHODS = [bsi.BSI(), bsi.BFN(), bsi.VDM()]


def log_snr(method, level):
    encoder = method.encoder(level)
    return 2 * torch.log(encoder.signal / encoder.noise)


@pytest.mark.parametrize("method", METHODS)
def test_the_sigmoid_weight_is_one_half_where_ln_snr_is_the_bias(method):
    t = torch.linspace(0.05, 1, 96, dtype=torch.float64)
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


@pytest.mark.parametrize("method", METHODS)
def test_weights_are_finite_from_the_first_level_to_the_last(method):
    ends = torch.tensor([method.levels.low, method.levels.high], dtype=torch.float64)
    for weight in (sigmoid_weight(method, 2.0), edm_weight(method)):
        assert bool(torch.isfinite(weight(ends)).all())


def engine(objective: Objective, spec=None) -> Engine:
    recipe = replace(bsi.recipes.digits(), method=spec or BSISpec(), objective=objective)
    torch.manual_seed(0)
    model = bsi.Model(
        torch.nn.Conv2d(1, 1, 3, padding=1), build_method(recipe.method), (1, 8, 8), bsi.Bins(-1.0, 1.0, 17)
    )
    model.denoiser.backbone.forward = lambda x, t: torch.tanh(x)
    return Engine(recipe, model, World(Place(), torch.device("cpu")), None)


def batch() -> Batch:
    torch.manual_seed(1)
    data = torch.randint(0, 17, (32, 1, 8, 8), dtype=torch.uint8)
    t = (torch.arange(32, dtype=torch.float64) / 32 + 0.3) % 1
    return Batch(Piece(0, 0, 0, 32), data, t, torch.randn(32, 1, 8, 8), None)


@pytest.mark.parametrize("spec", [BSISpec(), BFNSpec(), VDMSpec()])
def test_the_trainer_minimises_the_finite_bound_when_told(spec):
    trainer, given = engine(Objective(finite_k=7), spec), batch()
    method = trainer.model.method
    i = torch.floor(given.t * 7).long()
    x = trainer.model.values(given.data)
    expected = finite_training_loss(method, trainer.model.denoiser, x, paper_grid(method, 7), i, given.eps)
    assert torch.equal(trainer._losses(given), expected)
    assert set(i.tolist()) == set(range(7))


def test_the_trainer_weighs_levels_when_told():
    plain, weighed, given = engine(Objective()), engine(Objective(weight="sigmoid", bias=1.0)), batch()
    method = plain.model.method
    factor = sigmoid_weight(method, 1.0)(method.levels.icdf(given.t)).float()
    assert torch.allclose(weighed._losses(given), plain._losses(given) * factor)
    expected = training_loss(
        method, plain.model.denoiser, plain.model.values(given.data), given.t, given.eps, edm_weight(method)
    )
    assert torch.equal(engine(Objective(weight="edm"))._losses(given), expected)


@pytest.mark.parametrize("weight", ["elbo", "sigmoid", "edm"])
def test_the_journal_has_the_unweighed_loss_in_bits_whatever_the_weight(weight):
    weighed, given = engine(Objective(weight=weight)), batch()
    plain = engine(Objective())._losses(given).sum() / weighed.recipe.batch
    told = weighed._told(weighed._losses(given), given)
    assert told[-1].item() == pytest.approx(plain.item(), rel=1e-5)
    assert len(told) == (1 if weight == "elbo" else 2)
    first = replace(given, t=torch.zeros_like(given.t))  # where nothing is measured yet, EDM's weight is 0
    assert bool(torch.isfinite(weighed._told(weighed._losses(first), first)).all())


def test_a_weighted_run_has_its_bits_and_a_finite_one_its_own_name(tmp_path):
    """Trained not at all (rate 1e-12), with one seed: the bits of the journal are those of the plain objective."""
    small = replace(
        bsi.recipes.digits(), backbone=MLPConfig(width=16, depth=1), steps=3, batch=64, every=Every(journal=3)
    )
    small = replace(small, optimiser=replace(small.optimiser, lr=1e-12, final_lr=0.0))

    def last(name: str, **changes: object) -> dict:
        recipe = replace(small, **changes)
        return read_journal(bsi.train(recipe, out=tmp_path / name, device="cpu"))[-1]

    plain = last("plain")
    for audit in (False, True):
        weighed = last(f"edm-{audit}", objective=Objective(weight="edm"), audit=audit)
        assert weighed["bits_per_dim"] == pytest.approx(plain["bits_per_dim"], rel=1e-4)
        assert weighed["loss"] != pytest.approx(plain["loss"], rel=0.1)
    finite = last("finite", objective=Objective(finite_k=16))
    assert "bits_per_dim" not in finite
    assert finite["bits_per_dim_finite_k"] == pytest.approx(finite["loss"] / 2 / math.log(2))
    assert finite["bits_per_dim_finite_k"] > plain["bits_per_dim"]


def test_an_objective_is_part_of_the_recipe_and_of_its_record():
    recipe = replace(bsi.recipes.digits(), objective=Objective(finite_k=16))
    assert from_plain(Recipe, to_plain(recipe)) == recipe
    without = {name: value for name, value in to_plain(bsi.recipes.digits()).items() if name != "objective"}
    assert from_plain(Recipe, without) == bsi.recipes.digits()  # what was written before there was a choice


def test_a_weighted_finite_bound_is_refused():
    with pytest.raises(UsageError, match="finite_k=4"):
        Objective(finite_k=4, weight="edm")
    with pytest.raises(UsageError, match="at least 1: got 0"):
        Objective(finite_k=0)
