"""A scale far below `smoke` for the tests of the studies: two training steps, a handful of samples."""

from dataclasses import replace

from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.recipe import Recipe
from bsi.studies.scale import SCALES, Comparison

SMOKE = SCALES["smoke"]


def tiny(method: str) -> Recipe:
    recipe = SMOKE.comparisons[0].recipe(method)
    optimizer = replace(recipe.optimizer, warmup=0)
    backbone = DiTConfig(width=16, depth=1, heads=2, patch=4, dropout=0.0)
    return replace(recipe, backbone=backbone, steps=2, batch=16, optimizer=optimizer)


def tiny_unet(method: str) -> Recipe:
    return replace(tiny(method), backbone=UNetConfig(width=4, levels=1, dropout=0.0))


TINY = replace(
    SMOKE,
    comparisons=(Comparison(tiny, seeds=(0, 1)),),
    architecture=Comparison(tiny_unet, seeds=(0,)),
    parameters=Comparison(tiny, seeds=(0,)),
    convergence=tiny,
    profiled=tiny,
    transitions=tiny,
    samples=40,
    references=("test", "train"),
    steps=(2, 16),
    levels=4,
    recon=2,
    finite_levels=4,
    ks=(2, 16),
    profile_levels=17,
    profile_images=8,
    lambda_0=(1e-4, 1e-2, 1.0),
    trained_k=(4,),
    parameter_steps=(2, 4),
)
