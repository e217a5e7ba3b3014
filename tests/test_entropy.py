"""No reported bound is below the entropy of the data: rounding errors do not leak x into a latent (row 41)."""

import math
import re
import warnings
from dataclasses import replace

import pytest
import torch

import bsi
from bsi.data.batches import as_source
from bsi.errors import DataError, UsageError
from bsi.oracle import Mixture
from bsi.recipe import Every

PRECISIONS = {
    "bsi": lambda last: bsi.BSI(alpha_M=last),
    "bfn": lambda last: bsi.BFN(sigma_1=last**-0.5, clips=False),
    "vdm": lambda last: bsi.VDM(nu_max=last),
}
GAUSSIAN = Mixture.gaussian(torch.zeros(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))


class Zero(torch.nn.Module):
    """The best linear prediction, as by an untrained network with preconditioning."""

    def forward(self, input, t):
        return torch.zeros_like(input)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def continuous(method, **settings) -> bsi.Model:
    return bsi.Model(Zero(), method, (4,), parametrization="edm", **settings)


@pytest.mark.parametrize("last", [1e12, 1e14, 1e16, 1e20, 1e30, 1e300])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_gaussian_never_costs_less_than_its_entropy(name: str, last: float) -> None:
    """The error names the largest admissible precision, and with that the bound holds."""
    x, method = normal(512, 4), PRECISIONS[name](last)
    least = -float(GAUSSIAN.log_density(x.double()).mean()) / (4 * math.log(2))
    while True:
        try:
            bound = continuous(method).elbo(x, measure=16)
            break
        except UsageError as error:
            field, value = re.search(r"Use (\w+) [<>]= ([\d.e+-]+)\.$", str(error)).groups()
            method = type(method)(**{**vars(method), field: float(value)})
    assert last < 1e13 or method != PRECISIONS[name](last)
    assert bound.bits_per_dim > least - 4 * bound.monte_carlo_error


@pytest.mark.parametrize("count", [2, 17, 256, 65536])
@pytest.mark.parametrize("name", PRECISIONS)
def test_uniform_bins_cost_at_least_their_entropy(name: str, count: int) -> None:
    bins = bsi.Bins(-1.0, 1.0, count)

    method, index = PRECISIONS[name](1e13), torch.randint(count, (256, 4), generator=torch.Generator().manual_seed(1))
    model = bsi.Model(Zero(), method, (4,), bins, parametrization="edm")
    plain = model.denoiser.forward
    for forward in (plain, lambda *given: bins.values(bins.indices(plain(*given)))):
        model.denoiser.forward = forward
        bound = model.elbo(index, measure=16)
        assert bound.bits_per_dim > math.log2(count) - 4 * bound.monte_carlo_error


@pytest.mark.parametrize(("low", "high", "count"), [(1e3, 1001.0, 65536), (-1e6, -999_999.0, 256), (-1e308, 1e308, 2)])
def test_bins_that_float32_cannot_distinguish_are_rejected(low: float, high: float, count: int) -> None:
    """Different bins would have one value, and the bound would be that of fewer bins."""
    with pytest.raises(UsageError, match="float32"):
        bsi.Bins(low, high, count)


def test_units_that_no_last_precision_can_resolve_are_rejected() -> None:
    with pytest.raises(UsageError, match="Scale the data"):
        bsi.Model(Zero(), bsi.BSI(), (4,), bsi.Bins(-1e30, 1e30, 256))


@pytest.mark.filterwarnings("ignore:.*repeated")
@pytest.mark.parametrize("name", PRECISIONS)
def test_data_coarser_than_the_last_noise_is_rejected(name: str) -> None:
    method = PRECISIONS[name](1e6)
    for data, kind in (
        (1000 + 1e-2 * normal(64, 4), bsi.Standardize(1000.0, 1e-2)),  # a small deviation loses digits
        (normal(64, 4).half(), None),
        (normal(64, 4).bfloat16(), None),
        (1e5 * normal(64, 4), None),
    ):
        with pytest.raises(UsageError, match="resolution"):
            continuous(method, data=kind).elbo(data)
    continuous(PRECISIONS[name](1e4)).elbo(normal(64, 4).half())
    continuous(method).double().elbo(1e5 * normal(64, 4).double())


def test_repeated_values_give_a_warning_that_there_is_no_density() -> None:
    model, x = continuous(bsi.BSI()), normal(512, 4)
    for data in ((10 * x).round() / 10, x.clamp(min=0), x.where(torch.arange(4) > 0, 1.0)):
        with pytest.warns(UserWarning, match="repeated"):
            model.elbo(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.elbo(x)


@pytest.mark.parametrize(("step", "last", "rows"), [(1e-5, 1e12, 2048), (1e-4, 1e10, 200), (2.0**-15, 1e11, 200)])
def test_rounded_values_give_a_warning_that_there_is_no_density(step: float, last: float, rows: int) -> None:
    """Too many different values to be repeated often, but a network could learn their grid."""
    model, x = continuous(bsi.BSI(alpha_M=last), data=bsi.Standardize(0.0, 3.0)), 3 * normal(rows, 4)
    for data in ((x.double() / step).round() * step, ((x.double() / step).round() * step).float()):
        with pytest.warns(UserWarning, match=r"multiples of|repeated"):
            model.elbo(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.elbo(x)
        continuous(bsi.BSI(alpha_M=0.1 / step**2), data=bsi.Standardize(0.0, 1.0)).elbo((x / step).round() * step)


def test_stored_samples_are_said_to_have_no_density_once() -> None:
    """Data is read in batches, and each batch has other values."""
    with pytest.warns(UserWarning, match="repeated") as warned:
        continuous(bsi.BSI()).elbo(as_source((4 * normal(512, 4)).round()), batch_size=64)
    assert len(warned) == 1


@pytest.mark.parametrize(("step", "offset", "last", "rows"), [(1e-4 / 3, 0.1, 1e12, 1024), (1.7e-4, 0.0, 1e10, 512)])
def test_multiples_of_any_step_give_a_warning_that_there_is_no_density(step, offset, last, rows) -> None:
    """Also a row at a time; rounding to steps that the last level cannot resolve is harmless, however often it hits."""
    x = ((normal(rows, 4).double() / step).round() * step + offset).float()
    for data in (x, as_source(x)):
        with pytest.warns(UserWarning, match="repeated"):
            continuous(bsi.BSI(alpha_M=last)).elbo(data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        continuous(bsi.BSI(alpha_M=0.1 / step**2)).elbo(x)
        continuous(bsi.BSI()).elbo((1e4 * normal(4096, 4)).round() / 1e4)


def test_one_column_on_a_grid_among_many_is_named() -> None:
    x = normal(1024, 40)
    x[:, 7] = (x[:, 7] / 1.7e-4).round() * 1.7e-4
    model = bsi.Model(Zero(), bsi.BSI(alpha_M=1e10), (40,), parametrization="edm")
    with pytest.warns(UserWarning, match="in column 7 are repeated"):
        model.elbo(x)
    x[:, ::3] = x[:, ::3].round()
    with pytest.warns(UserWarning, match=r"in column 0, 3, 6 and 12 more are repeated \(a share of 1\): they have no"):
        model.elbo(x)


def test_one_frequent_value_gives_a_warning_that_data_is_discrete() -> None:
    x = normal(4096, 4)
    x[:32] = 0.25
    with pytest.warns(UserWarning, match="repeated"):
        continuous(bsi.BSI()).elbo(x)


def test_values_below_the_smallest_normal_number_are_coarser_than_others() -> None:
    data = 1e-40 * normal(64, 4)
    with pytest.raises(UsageError, match="resolution"):
        continuous(bsi.BSI(alpha_M=1e12), data=bsi.Standardize(0.0, 1e-40)).elbo(data)


def test_one_column_of_integers_among_many_is_named() -> None:
    x = normal(512, 200)
    x[:, 17] = x[:, 17].round()
    model = bsi.Model(Zero(), bsi.BSI(), (200,), parametrization="edm")
    with pytest.warns(UserWarning, match="in column 17 are repeated"):
        model.elbo(x)


# Data for models of bins


def test_values_in_0_to_1_are_rejected_for_bins_from_minus_1() -> None:
    bins, index = bsi.Bins.uint8(), torch.randint(256, (16, 4), generator=torch.Generator().manual_seed(2))
    model, tensor = bsi.Model(Zero(), bsi.BSI(), (4,), bins), (index / 255).float()  # torchvision's ToTensor
    for call in (model, model.elbo):
        with pytest.raises(DataError, match=r"bins\(data\)"):
            call(tensor)
    assert torch.equal(bins(tensor).long(), index)
    assert torch.equal(bins(2 * tensor - 1, (-1.0, 1.0)).long(), index)
    assert model.elbo(bins(tensor)).bits_per_dim == model.elbo(model.values(index)).bits_per_dim
    bsi.Model(Zero(), bsi.BSI(), (4,), bsi.Bins(0.0, 1.0, 256)).elbo(tensor)
    model.elbo(model.values(128 + index // 2))  # bright images, on the centers of their bins


# Types of weights


@pytest.mark.parametrize("data", [torch.float64, torch.uint8], ids=str)
def test_a_model_in_double_precision_trains_samples_and_is_evaluated(data: torch.dtype) -> None:
    bins = bsi.Bins.uint8() if data == torch.uint8 else None
    model = bsi.Model(bsi.backbones.build("mlp-8x1", (4,), bins and 256), bsi.BSI(), (4,), bins).double()
    x = (50 * normal(8, 4) + 128).clamp(0, 255).to(data) if bins else normal(8, 4).to(data)
    assert model(x).dtype == torch.float64
    assert math.isfinite(model.elbo(x).bits_per_dim)
    assert model.sample(2, steps=2).dtype == data
    assert model.float()(x.float() if bins is None else x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_samples_and_bounds_of_16_bit_weights_are_float32(dtype: torch.dtype) -> None:
    model, x = bsi.Model(bsi.backbones.build("mlp-8x1", (4,)), bsi.BSI(), (4,)), normal(8, 4)
    exact = model.elbo(x)
    found = model.to(dtype).elbo(x)
    assert float(found) == pytest.approx(float(exact), rel=0.02)
    assert model.sample(2, steps=2).dtype == torch.float32


def test_a_last_precision_too_small_for_the_bins_is_rejected_with_a_sufficient_one(tmp_path) -> None:
    """16-bit audio with the 8-bit default: more than half of the bound was reconstruction."""
    data = torch.randint(2**16, (64, 4), generator=torch.Generator().manual_seed(3))
    for name, few, more in (("bsi", "alpha_M", 6.7e10), ("bfn", "sigma_1", 3.8e-6), ("vdm", "nu_max", 6.7e10)):
        recipe = replace(bsi.recipes.arrays(name), steps=1, batch=64, every=Every(checkpoint=1))
        with pytest.raises(UsageError, match=f"65536 bins.*{few} [<>]= {more:.1e}".replace("+", r"\+")):
            bsi.train(recipe, data=data, kind=bsi.Bins.int16(), out=tmp_path / name)
        method = replace(recipe.method, **{few: more})
        bsi.train(replace(recipe, method=method), data=data, kind=bsi.Bins.int16(), out=tmp_path / name, device="cpu")
