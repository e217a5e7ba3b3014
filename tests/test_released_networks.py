"""The released networks are what their model cards say."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import bsi
from bsi.errors import UsageError
from bsi.io import data_folder
from bsi.rng import subset

CARD = Path(__file__).parents[1] / "networks" / "src" / "bsi_networks" / "cifar10" / "README.md"
TEST_BATCH = data_folder() / "cifar-10-batches-bin" / "test_batch.bin"


@pytest.fixture
def model() -> bsi.Model:
    try:
        return bsi.Model.from_pretrained("cifar10")
    except UsageError:
        pytest.skip("the package bsi-networks is not installed: pip install ./networks")


def test_a_sample_takes_seconds_on_a_cpu(model: bsi.Model) -> None:
    images = model.sample(1, steps=2, seed=0)
    assert images.shape == (1, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert 20 < images.float().mean() < 235


@pytest.mark.slow
@pytest.mark.skipif(not TEST_BATCH.exists(), reason=f"{TEST_BATCH} is not here")
def test_cifar10_has_the_bits_per_dim_of_its_card(model: bsi.Model) -> None:
    """On 1000 random test images, within three standard errors of the difference to the whole test set."""
    value, monte_carlo, _ = map(
        float, re.findall(r"bits/dim \| (\S+) ± (\S+) ± (\S+), .*10,000 test", CARD.read_text())[0]
    )
    images = np.fromfile(TEST_BATCH, np.uint8).reshape(-1, 3073)[:, 1:].reshape(-1, 3, 32, 32)
    elbo = model.elbo(torch.from_numpy(images[subset(len(images), 1000)]), measure=2)
    error = np.hypot(elbo.data_error, np.hypot(elbo.monte_carlo_error, monte_carlo))
    assert abs(elbo.bits_per_dim - value) < 3 * error
    assert error < 0.06
