"""Measurements of one network, and the features of fd-digits."""

import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bsi
from bsi.data.store import open_dataset
from bsi.elbo import reconstruction_loss
from bsi.errors import DataError
from bsi.metrics import Extractor, Moments, frechet_distance, metric_name
from bsi.rng import standard_normal
from bsi.studies.measure import Bound, DigitsFeatures, LevelErrors, Store
from bsi.studies.scale import SCALES
from bsi.values import to_uint8

DIGITS, SMOKE = bsi.recipes.digits(), SCALES["smoke"]
PUBLISHED = "13c809cff5b50a068d8777d1946344f3e566c01df1caa164707bf67ad763149f"


@pytest.fixture(scope="module")
def model():
    return bsi.load("digits")


def test_studies_decode_with_the_precision_of_the_job(model, tmp_path):
    x = model.values(torch.as_tensor(open_dataset("digits").split("test")[:]))
    eps = standard_normal(1, torch.arange(len(x)), 0, model.shape)
    for alpha_R in (0.01 * model.method.alpha_M, 2 * model.method.alpha_M):
        found = Bound(DIGITS, 2, 2, alpha_R=alpha_R).measure(model, Store(tmp_path, SMOKE)).values
        with torch.no_grad():
            method = replace(model.method, alpha_R=alpha_R)
            bits = reconstruction_loss(method, model.denoiser, x, eps, model.kind).mean() / (64 * math.log(2))
        assert found["reconstruction"] == pytest.approx(float(bits), rel=0.05)


def test_level_errors_have_the_relative_distance_of_predictions_from_their_latents(model, tmp_path):
    test = open_dataset("digits").split("test")
    found = LevelErrors(DIGITS, levels=3, images=2).measure(model, Store(tmp_path, SMOKE)).arrays
    ids, level = torch.tensor([0, len(test) // 2]), torch.from_numpy(found["level"])[1].expand(2)
    x = model.values(torch.as_tensor(test[ids.numpy()]))
    psi = model.method.encoder(level).encode(x, standard_normal(2, ids, 0, model.shape))
    with torch.no_grad():
        apart = (psi - model.denoiser(psi, level)).flatten(1).norm(dim=1) / psi.flatten(1).norm(dim=1)
    assert found["distance"][1].tolist() == pytest.approx(apart.tolist(), rel=1e-4)


def pictures(indices: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(to_uint8(open_dataset("digits").bins.values(indices))).expand(-1, 3, -1, -1)


def test_the_features_of_digits_separate_classes_and_noise():
    loaded, extractor = open_dataset("digits"), DigitsFeatures()
    assert isinstance(extractor, Extractor)
    assert (extractor.hash, metric_name(extractor)) == (PUBLISHED, "fd-digits")
    logits = extractor.network(pictures(loaded.test)[:, :1].float() / 127.5 - 1)
    assert (logits.argmax(1).numpy() == loaded.labels.test).mean() > 0.98
    real = Moments.of(extractor(pictures(loaded.test)))
    noise = torch.randint(0, 256, (500, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    near = frechet_distance(Moments.of(extractor(pictures(loaded.train))), real)
    far = frechet_distance(Moments.of(extractor(noise.expand(-1, 3, -1, -1))), real)
    assert 0 < near < 3 < 50 < far
    with pytest.raises(DataError, match=r"\(32, 32\)"):
        extractor(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_the_training_of_the_features_is_deterministic(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "benchmarks"))
    fit = importlib.import_module("digits_features").fit
    a, b = fit(steps=3, batch=8), fit(steps=3, batch=8)
    assert all(torch.equal(a[name], b[name]) for name in a)
