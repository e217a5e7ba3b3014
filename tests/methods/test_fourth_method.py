"""A method from outside the package: registered, it trains, samples, is evaluated, stored and loaded."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import bsi
from bsi.backbones.config import MLPConfig
from bsi.cli import main
from bsi.errors import UsageError
from bsi.gaussian import Encoder
from bsi.levels import LogUniform
from bsi.methods import METHODS, Method, register
from bsi.recipe import Data, Every, Optimizer, Recipe, Samples
from bsi.runtime.export import export


@dataclass(frozen=True)
class Exploding:
    """A variance-exploding diffusion, psi = x + eps / sqrt(level): EDM's process as a method of about 36 lines."""

    low: float = 1e-2
    high: float = 1e4

    c: ClassVar[float] = 0.0
    parametrization: ClassVar[str] = "edm"
    decoder: ClassVar[str] = "cdf"
    clips: ClassVar[bool] = False

    @property
    def levels(self):
        return LogUniform(self.low, self.high)

    @property
    def recon_precision(self):
        return 2 * self.high

    @property
    def density_precision(self):
        return self.high

    def prior(self, eps):
        return eps / math.sqrt(self.low)

    def encoder(self, level):
        level = level.double()
        return Encoder(signal=torch.ones_like(level), noise=level.rsqrt())

    def gain(self, level):
        return level.double()

    def level(self, gain):
        return gain.double()

    def decode(self, latent, level, predict):
        return predict(latent, level)

    def prior_kl(self, x):
        return 0.5 * self.low * x.double().flatten(1).square().sum(1)


RECIPE = Recipe(
    name="exploding",
    method=Exploding(),
    backbone=MLPConfig(width=64, depth=2),
    data=Data("digits"),
    steps=60,
    batch=64,
    optimizer=Optimizer(lr=3e-3, warmup=10),
    virtual_shards=4,
    every=Every(journal=20, evaluate=60, sample=60, checkpoint=30),
    samples=Samples(4, bsi.Sampler(steps=3)),
    threads=1,
)


@pytest.fixture
def registered():
    register("exploding", Exploding)
    yield
    del METHODS["exploding"]


@pytest.mark.usefixtures("registered")
def test_a_registered_method_works_in_every_command(tmp_path: Path, capsys) -> None:
    assert isinstance(Exploding(), Method)
    run = bsi.train(replace(RECIPE, steps=30, every=Every(checkpoint=30)), out=tmp_path / "run", device="cpu").path
    run = bsi.train(RECIPE, out=tmp_path / "run", allow=("steps",), device="cpu").path
    model = bsi.load(run)
    assert model.method == Exploding()
    drawn = model.sample(3, steps=4)
    assert drawn.shape == (3, 1, 8, 8)
    assert torch.equal(bsi.load(export(run)).sample(3, steps=4), drawn)
    assert main(["eval", str(run), "--bpd", "--limit", "16", "--json", "--device", "cpu"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["bits_per_dim"] < 10
    assert main(["sample", str(run), "--num", "2", "--steps", "2", "--out", str(tmp_path / "x.png")]) == 0


def test_an_unknown_method_in_a_file_names_the_known_ones(tmp_path: Path) -> None:
    register("exploding", Exploding)
    try:
        run = bsi.train(replace(RECIPE, steps=1, every=Every(), threads=1), out=tmp_path / "run", device="cpu").path
    finally:
        del METHODS["exploding"]
    with pytest.raises((UsageError, ValueError), match="bsi, bfn, vdm"):
        bsi.load(run)


def test_a_name_is_registered_once() -> None:
    register("bsi", bsi.BSI)  # a second time, with the same result
    with pytest.raises(UsageError, match="taken"):
        register("bsi", Exploding)
