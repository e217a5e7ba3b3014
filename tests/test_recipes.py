"""Recipes hold the paper's tables and their evidence, and can be stored as JSON."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

import bsi
from bsi import recipes
from bsi.backbones.config import AutoencoderConfig, DiTConfig, MLPConfig, UNetConfig
from bsi.cli.training import parse
from bsi.errors import UsageError
from bsi.methods import BFN, BSI, METHODS, VDM, check_last_level
from bsi.recipe import Data, Ema, Every, Optimizer, Recipe, changes, flat, from_plain, kinds, to_plain
from bsi.recipes import RECIPES, evidence, named_recipe
from bsi.values import Bins, Latents, Standardize, Symbols

ALL = [(name, method) for name in RECIPES for method in METHODS]

# The paper's tables, as printed: "Model and training parameters", the U-Nets' and the DiTs'.
CIFAR10 = {"lr": 2e-4, "schedule": "constant", "weight_decay": 1e-2, "batch": 128, "ema.beta": 0.9999}
IMAGENET = {"lr": 5e-4, "schedule": "cosine", "weight_decay": 1e-2, "batch": 512, "ema.beta": 0.9999}
UNET, DIT = {"levels": 32, "dropout": 0.1, "heads": 1}, {"width": 1024, "depth": 24, "heads": 16, "dropout": 0.05}
PAPER = [
    ("cifar10-unet", CIFAR10, UNET | {"width": 128}, 5_000_000),
    ("imagenet32-dit-l2", IMAGENET, DIT | {"patch": 2}, 2_000_000),
    ("imagenet64-dit-l4", IMAGENET, DIT | {"patch": 4}, 1_000_000),
    ("imagenet32-unet", IMAGENET, UNET | {"width": 256}, 100_000),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "training", "network", "steps"), PAPER)
def test_the_papers_tables_are_in_its_recipes(name: str, training: dict, network: dict, steps: int, method) -> None:
    recipe = named_recipe(name, method)
    found = flat(recipe)
    assert {field: found[f"backbone.{field}"] for field in network} == network
    assert {field: found.get(field, found.get(f"optimizer.{field}")) for field in training} == training
    assert (recipe.steps, recipe.ema.start) == (steps, 1000)
    assert not recipe.data.flips
    assert recipe.sigma_data == 1.0
    if recipe.optimizer.schedule == "cosine":
        assert recipe.optimizer.final_lr == 5e-5
        assert recipe.rate(0) == 1e-8, "linear warm-up from 1e-8"
        assert recipe.rate(recipe.steps - 1) == pytest.approx(5e-5)


def test_the_methods_have_the_papers_parameters() -> None:
    ours = BSI()
    assert (ours.levels.low, ours.levels.high, ours.recon_precision) == (1e-2, 1e-2 + 1e6, 2e6)
    assert ours == bsi.BSI()
    assert BFN() == bsi.BFN()
    assert VDM() == bsi.VDM()
    assert VDM().levels.high == pytest.approx(math.exp(13.3))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_carries_its_evidence(name: str) -> None:
    found = evidence(name)
    for field in dataclasses.fields(found):
        assert getattr(found, field.name), f"{name} does not say its {field.name}"
    assert name in found.command
    assert named_recipe(name).name == name


@pytest.mark.parametrize(("name", "method"), ALL)
def test_a_recipe_survives_json(name: str, method) -> None:
    recipe = named_recipe(name, method)
    text = json.dumps(to_plain(recipe), allow_nan=False)
    assert from_plain(Recipe, json.loads(text)) == recipe
    assert isinstance(recipe.method, METHODS[method])


def test_infinity_survives_json() -> None:
    recipe = replace(recipes.digits(), method=BSI(gamma_0=math.inf))
    assert from_plain(Recipe, json.loads(json.dumps(to_plain(recipe), allow_nan=False))) == recipe


def test_recipes_name_only_registered_kinds() -> None:
    networks, data = {DiTConfig, UNetConfig, MLPConfig, AutoencoderConfig}, {Bins, Symbols, Standardize, Latents}
    assert set(kinds().values()) == {BSI, BFN, VDM} | networks | data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"backbone": {"kind": "builtins.eval", "width": 3}},
            "backbone is of kind dit, unet, mlp, autoencoder: got 'builtins.eval'",
        ),
        ({"backbone": {"kind": "bsi", "lambda_0": 1.0}}, "backbone is of kind dit"),
        ({"method": {"kind": ["bsi"]}}, "method is of kind bsi, bfn, vdm"),
        ({"method": "bsi"}, "method is of kind"),
        ({"method": {"kind": "bsi", "lambda_1": 1.0}}, "method: unknown lambda_1"),
        ({"stepz": 3}, "unknown stepz"),
        ({"steps": "3"}, "steps must be int: got '3'"),
        ({"steps": True}, "steps must be int"),
        ({"steps": 3.5}, "steps must be int"),
        ({"compile": 1}, "compile must be bool"),
        ({"precision": "fp4"}, "precision must be one of auto"),
        ({"optimizer": {"beta_1": 0.9}}, "optimizer: missing lr"),
        ({"optimizer": 3}, "optimizer must be a table"),
        ({"sigma_data": "big"}, "sigma_data must be float"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_a_file_that_is_no_recipe_is_rejected(change: dict, message: str) -> None:
    plain = to_plain(recipes.digits()) | change
    with pytest.raises(UsageError, match=message):
        from_plain(Recipe, plain)


def test_changes_are_listed_by_dotted_name() -> None:
    a = recipes.digits()
    b = replace(a, steps=7, optimizer=replace(a.optimizer, lr=1e-4), method=BFN())
    names = [change.name for change in changes(a, b)]
    assert names[:2] == ["method.kind", "method.lambda_0"]
    assert {"steps", "optimizer.lr", "method.sigma_1"} <= set(names)
    assert str(changes(a, replace(a, seed=3))[0]) == "seed: 0 -> 3"
    assert changes(a, a) == []
    assert flat(a)["ema.beta"] == a.ema.beta


def test_the_rate_rises_from_1e_8_and_falls_by_a_cosine() -> None:
    o = Optimizer(lr=1e-3, warmup=10, schedule="cosine", final_lr=1e-5)
    assert o.rate(0, 111) == 1e-8
    assert o.rate(5, 111) == pytest.approx((1e-3 + 1e-8) / 2)
    assert o.rate(10, 111) == 1e-3
    assert o.rate(60, 111) == pytest.approx((1e-3 + 1e-5) / 2), "half way after the warm-up"
    assert o.rate(110, 111) == pytest.approx(1e-5), "the last step"
    rates = [o.rate(step, 111) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert replace(o, schedule="constant").rate(10**9, 111) == 1e-3


def test_the_average_equals_the_weights_until_its_first_update() -> None:
    ema = Ema(beta=0.9999, start=1000)
    assert [ema.weight(step) for step in (1, 999, 1000)] == [1.0] * 3
    assert ema.weight(1001) == pytest.approx(1e-4)


def test_intervals_are_due_at_multiples_and_at_the_end() -> None:
    every = Every(journal=50, evaluate=0, sample=100, checkpoint=0)
    assert every.due(49, 1000) == every.due(0 + 1, 1000)
    assert not every.due(49, 1000)
    assert every.due(50, 1000) == {"journal"}
    assert every.due(1000, 1000) == {"journal", "sample", "checkpoint"}, "the last step is saved, and 0 means never"


@pytest.mark.parametrize(
    "build",
    [
        lambda: Optimizer(lr=0.0),
        lambda: Optimizer(lr=1e-3, final_lr=1e-2),
        lambda: Optimizer(lr=1e-3, beta_1=1.0),
        lambda: Ema(beta=1.0),
        lambda: Every(journal=0),
        lambda: Data("x", workers=-1),
        lambda: replace(recipes.digits(), steps=0),
        lambda: replace(recipes.digits(), seed=-1),
        lambda: replace(recipes.digits(), audit=True, virtual_shards=12),
        lambda: replace(recipes.digits(), audit=True, precision="bf16"),
        lambda: replace(recipes.digits(), batch=60, accumulation=2).check(1),
        lambda: replace(recipes.digits(), steps=10**40),
        lambda: recipes.digits().check(3),
        lambda: named_recipe("digitz"),
    ],
)
def test_invalid_recipes_are_rejected(build) -> None:
    with pytest.raises(UsageError):
        build()


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean 'cifar10-unet'"):
        named_recipe("cifar-unet")


def test_recipes_need_no_torch() -> None:
    code = "import sys; from bsi.cli.training import parse; parse(['digits']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["../x", "/x", "a/b", ".x", "", "x" * 101, "a b", "x\n", "x\x00"])
def test_a_recipe_name_is_no_path(name: str) -> None:
    """Row 50: it may come from a file, and names the files that are written."""
    with pytest.raises(UsageError, match="letters, digits"):
        replace(recipes.digits(), name=name)
    with pytest.raises(UsageError, match="letters, digits"):
        from_plain(Recipe, {**to_plain(recipes.digits()), "name": name})


@pytest.mark.parametrize(("batch", "shards"), [(32, 32), (1, 1), (20, 20), (31, 31), (67, 1), (96, 48), (128, 64)])
def test_any_batch_is_divided_into_shards_that_fit(batch: int, shards: int) -> None:
    recipe = replace(recipes.digits(), batch=batch, virtual_shards=64)
    recipe.check(1)
    assert recipe.shards == shards
    audited = replace(recipe, audit=True).shards
    assert batch % audited == 0
    assert audited & (audited - 1) == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_recipe_for_sound_resolves_its_bins(method: str) -> None:
    check_last_level(named_recipe("audio-mini", method).method, bsi.Bins(-1.0, 1.0, 65536))
    with pytest.raises(UsageError, match="bins"):
        check_last_level(named_recipe("arrays", method).method, bsi.Bins(-1.0, 1.0, 65536))


def test_a_shorter_run_scales_its_warm_up_and_average() -> None:
    short = recipes.digits().shortened(400)
    assert (short.steps, short.optimizer.warmup, short.ema.start, short.ema.beta) == (400, 10, 10, 0.95)
    assert recipes.digits().shortened(8000) == replace(recipes.digits(), steps=8000)
    constant = replace(recipes.digits(), optimizer=replace(recipes.digits().optimizer, schedule="constant"))
    assert constant.shortened(400) == replace(constant, steps=400), "a run with a constant rate can be extended"
    parsed = parse(["digits", "--steps", "400", "--ema.start", "7"])[0].recipe
    assert parsed == replace(short, ema=replace(short.ema, start=7))
