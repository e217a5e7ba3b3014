"""The features of the Fréchet distance fd-digits."""

import hashlib

import numpy as np
import pytest
import torch

from bsi.data.store import open_dataset
from bsi.errors import DataError
from bsi.metrics import Extractor, Moments, frechet_distance, metric_name
from bsi.studies.digits_features import DigitsFeatures, fit, packaged_weights
from bsi.values import to_uint8

PUBLISHED = "13c809cff5b50a068d8777d1946344f3e566c01df1caa164707bf67ad763149f"


def pictures(indices: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(to_uint8(open_dataset("digits").bins.values(indices))).expand(-1, 3, -1, -1)


def test_the_weights_are_the_published_ones_and_the_distance_is_not_called_fid():
    extractor = DigitsFeatures()
    assert extractor.hash == hashlib.sha256(packaged_weights()).hexdigest() == PUBLISHED
    assert isinstance(extractor, Extractor)
    assert metric_name(extractor) == "fd-digits"


def test_the_features_distinguish_digits_from_each_other_and_from_noise():
    loaded, extractor = open_dataset("digits"), DigitsFeatures()
    assert (extractor.classify(pictures(loaded.test)).numpy() == loaded.labels.test).mean() > 0.98
    real = Moments.of(extractor(pictures(loaded.test)))
    noise = torch.randint(0, 256, (500, 1, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    near = frechet_distance(Moments.of(extractor(pictures(loaded.train))), real)
    far = frechet_distance(Moments.of(extractor(noise.expand(-1, 3, -1, -1))), real)
    assert 0 < near < 3 < 50 < far


def test_other_sizes_are_rejected():
    with pytest.raises(DataError, match=r"\(32, 32\)"):
        DigitsFeatures()(torch.zeros(1, 3, 32, 32, dtype=torch.uint8))


def test_the_fit_depends_on_nothing():
    a, b = fit(steps=3, batch=8), fit(steps=3, batch=8)
    assert all(torch.equal(a[name], b[name]) for name in a)
