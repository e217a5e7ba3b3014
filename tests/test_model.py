"""`bsi.Model`: what most users write, with a three-line network."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import bsi
from bsi.density import _levels
from bsi.elbo import Elbo
from bsi.errors import UsageError
from bsi.levels import low_discrepancy
from bsi.objective import training_loss

METHODS = [bsi.BSI(), bsi.BFN(), bsi.VDM()]


class MyNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, mu, t):
        return self.layer(torch.cat([mu, t[:, None, None, None].expand(-1, 1, 8, 8)], 1))


class Elementwise(torch.nn.Module):
    """A network whose output for a sample is the same to the last bit in any batch."""

    def forward(self, mu, t, cond=None):
        shift = 0.0 if cond is None else cond.to(mu.dtype).reshape(len(mu), *[1] * (mu.ndim - 1))
        return torch.sin(3 * mu + shift) * t.reshape(len(mu), *[1] * (mu.ndim - 1))


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_readme_example_works(method):
    """The snippet of the README: train on bytes, sample bytes, print the bound with its two errors."""
    torch.manual_seed(0)
    train = torch.randint(100, 156, (64, 3, 8, 8), dtype=torch.uint8)
    model = bsi.Model(MyNet(), method, shape=(3, 8, 8), data=bsi.Bins.uint8())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(train)
        assert loss.shape == (64,)
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.mean().item())
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])
    images = model.sample(5, steps=4, seed=0)
    assert (images.dtype, images.shape) == (torch.uint8, (5, 3, 8, 8))
    bound = model.bits_per_dim(train[:8])
    assert isinstance(bound, Elbo)
    assert math.isfinite(bound.bits_per_dim)
    assert bound.monte_carlo_error > 0
    assert "bits/dim" in str(bound)


def test_forward_is_the_training_loss_at_stratified_levels():
    model = bsi.Model(Elementwise(), bsi.BSI(), shape=(4,))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    ours = model(x)
    torch.manual_seed(1)
    delta = torch.rand((), dtype=torch.float64)
    expected = training_loss(bsi.BSI(), model.denoiser, x, low_discrepancy(6, delta), torch.randn_like(x))
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_levels_of_the_loss_are_stratified_over_the_global_batch(monkeypatch):
    """Four ranks with three samples each draw the twelve strata together, for any random state."""

    def on_rank(rank: int) -> torch.Tensor:
        shared = torch.tensor(0.3, dtype=torch.float64)
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
        monkeypatch.setattr("torch.distributed.broadcast", lambda delta, src: delta.copy_(shared))
        return _levels(torch.zeros(3, 2))

    t = torch.cat([on_rank(rank) for rank in range(4)])
    torch.testing.assert_close(t, low_discrepancy(12, 0.3), rtol=0, atol=0)


@pytest.mark.parametrize("solver", ["posterior", "sde2", "ode2"])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_sample_i_depends_on_seed_and_i_only(method, solver):
    model = bsi.Model(Elementwise(), method, shape=(2, 3))
    whole = model.sample(8, steps=5, seed=11, solver=solver, batch_size=8)
    for size in (1, 3):
        assert torch.equal(model.sample(8, steps=5, seed=11, solver=solver, batch_size=size), whole)
    assert torch.equal(model.sample(3, steps=5, seed=11, solver=solver), whole[:3])
    assert not torch.equal(model.sample(8, steps=5, seed=12, solver=solver), whole)
    assert len({tuple(row.flatten().tolist()) for row in whole}) == 8


def test_a_sampler_is_a_record_or_its_fields_and_a_range_names_the_samples():
    model = bsi.Model(Elementwise(), bsi.BSI(), shape=(3,))
    sampler = bsi.Sampler(steps=4, solver="sde2", grid="paper", noise="independent")
    whole, counts = model.sample(6, sampler, seed=2), []
    assert torch.equal(model.sample(6, seed=2, steps=4, solver="sde2", grid="paper", noise="independent"), whole)
    assert torch.equal(model.sample(range(1, 6, 2), sampler, seed=2), whole[1::2])
    assert torch.equal(model.sample(6, sampler, seed=2, batch_size=4, progress=counts.append), whole)
    assert counts == 5 * [4] + 5 * [2]
    *_, last = model.trajectory(range(2, 4), sampler, seed=2)
    assert torch.equal(last.x_hat, whole[2:4])


def test_labels_are_one_number_or_a_repeated_sequence():
    network = bsi.backbones.build("mlp-8x1", (3,), num_classes=3)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    model = bsi.Model(network, bsi.BSI(), (3,))
    apart = {label: model.sample(5, steps=2, label=label) for label in range(3)}
    torch.testing.assert_close(model.sample(5, steps=2, cond=torch.full((5,), 2)), apart[2])
    turns = torch.stack([apart[i % 3][i] for i in range(5)])
    torch.testing.assert_close(model.sample(5, steps=2, label=range(3)), turns)
    torch.testing.assert_close(model.sample(range(3, 5), steps=2, label=(0, 1, 2)), turns[3:])
    assert not torch.allclose(apart[0], apart[1])
    with pytest.raises(UsageError, match="labels 0 to 2"):
        model.sample(2, label=4)
    with pytest.raises(UsageError, match="either"):
        model.sample(2, label=1, cond=torch.zeros(2))
    with pytest.raises(UsageError, match="without labels"):
        bsi.Model(bsi.backbones.build("mlp-8x1", (3,)), bsi.BSI(), (3,)).sample(2, label=1)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 2, 3, 4)])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_sample_may_be_a_number_a_vector_or_have_any_number_of_axes(method, shape):
    for bins in (None, bsi.Bins.uint8()):
        model = bsi.Model(Elementwise(), method, shape, bins)
        x = 2 * torch.rand(3, *shape, generator=torch.Generator().manual_seed(0)) - 1
        assert model(x).shape == (3,)
        assert model.sample(3, steps=2).shape == (3, *shape)
        assert model.elbo(x).n == math.prod(shape)


def test_integers_are_bins_and_floats_are_values():
    model = bsi.Model(Elementwise(), bsi.BSI(), shape=(3,), data=bsi.Bins(-1.0, 1.0, 17))
    index = torch.tensor([[0, 8, 16]])
    assert model.values(index).tolist() == [[-1.0, 0.0, 1.0]]
    assert model.values(torch.tensor([[0.25, 0.0, -1.0]])).tolist() == [[0.25, 0.0, -1.0]]
    assert model.data(torch.tensor([[-1.3, 0.01, 0.99]])).tolist() == [[0, 8, 16]]
    for same in (index, index.to(torch.uint8), model.values(index), model.values(index).double()):
        assert model.elbo(same, seed=5).bits_per_dim == pytest.approx(model.elbo(index, seed=5).bits_per_dim, rel=1e-4)


def test_numpy_arrays_and_float64_are_data_too():
    """Float64, NumPy's default, is standardized as it is and then computed with in the dtype of the network."""
    standardize = bsi.Standardize(mean=1e6, std=2.0)
    model = bsi.Model(bsi.backbones.build("mlp-8x1", (4,)), bsi.BSI(alpha_M=1e3), (4,), data=standardize)
    assert "BSI(" in str(model)
    assert "std=2.0" in str(model)
    standard = np.random.default_rng(0).normal(size=(6, 4))
    x = 1e6 + 2 * standard
    assert model.values(x).dtype == torch.float32
    torch.testing.assert_close(model.values(x), torch.from_numpy(standard).float(), rtol=1e-5, atol=1e-6)
    assert model(torch.from_numpy(x)).dtype == torch.float32
    assert torch.equal(model.elbo(x).nats, model.elbo(torch.from_numpy(x)).nats)
    assert model.double()(torch.from_numpy(x)).dtype == torch.float64
    binned = bsi.Model(Elementwise(), bsi.BSI(), (3,), bsi.Bins.int16())
    for kind in (np.uint16, "<u2", ">u2", np.int32):
        index = np.array([[0, 40_000, 65_535]], kind)
        assert torch.equal(binned.values(index), binned.values(torch.tensor([[0, 40_000, 65_535]])))


@pytest.mark.filterwarnings("ignore:.*repeated")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_data_is_converted_to_float32(dtype):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    model = bsi.Model(Elementwise(), bsi.BSI(alpha_M=100.0), shape=(4,))
    assert model(x).dtype == torch.float32
    assert model.elbo(x, seed=1).bits_per_dim == model.elbo(x.float(), seed=1).bits_per_dim
    assert model(x.double()).dtype == torch.float64, "wider types are kept"


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_bf16_network_trains_and_is_evaluated_finitely_on_extreme_bins(method):
    """Row 14 of the reliability table: extreme levels, edge bins, bf16 inside the network."""

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, mu, t):
            return self.layer(mu.to(torch.bfloat16))

    torch.manual_seed(3)
    model = bsi.Model(Half(), method, shape=(4,), data=bsi.Bins.uint8())
    edges = torch.tensor([[0, 255, 0, 255], [255, 255, 255, 255], [0, 0, 0, 0]], dtype=torch.uint8)
    loss = model(edges)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert torch.isfinite(model.elbo(edges).nats).all()
    assert model.sample(4, steps=3).shape == (4, 4)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_method_clips_to_the_range_of_the_bins_if_asked(method):
    bins = bsi.Bins(-1.0, 1.0, 17)
    for clips in (False, True):
        chosen = replace(method, clips=clips)
        assert bsi.Model(Elementwise(), chosen, (3,), bins).denoiser.clip == ((-1.0, 1.0) if clips else None)
        assert bsi.Model(Elementwise(), chosen, (3,)).denoiser.clip is None
    assert bsi.Model(Elementwise(), method, (3,), bins).sample(4, steps=2).max() <= 16


# Conditions


def test_labels_condition_loss_samples_and_bound():
    model = bsi.Model(Elementwise(), bsi.BSI(), shape=(4,))
    x, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(4)), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = []
    for cond in (labels, torch.zeros(6, dtype=torch.int64)):
        torch.manual_seed(5)
        losses.append(model(x, cond))
    assert torch.equal((losses[0] == losses[1]), labels == 0)
    whole = model.sample(6, steps=4, cond=labels)
    assert torch.equal(model.sample(6, steps=4, cond=labels, batch_size=4), whole)
    plain = model.sample(6, steps=4, cond=torch.zeros(6))
    assert torch.equal((whole == plain).all(1), labels == 0)
    assert model.elbo(x, labels).nats.shape == (6,)


def test_guidance_amplifies_the_effect_of_a_label_and_needs_one():
    class Told(torch.nn.Module):
        def forward(self, mu, t, cond=None):
            return torch.zeros_like(mu) if cond is None else cond[:, None].to(mu.dtype).expand_as(mu)

    model, labels = bsi.Model(Told(), bsi.BSI(), shape=(3,)), torch.tensor([1, 2])
    free, plain, guided = (
        model.sample(2, steps=1, solver="ode2", cond=cond, guidance=scale)
        for cond, scale in ((None, 1.0), (labels, 1.0), (labels, 3.0))
    )
    torch.testing.assert_close(guided - free, 3 * (plain - free), rtol=1e-4, atol=1e-6)
    assert bool((plain != free).all())
    with pytest.raises(UsageError, match="guidance needs a condition to follow"):
        model.sample(2, steps=1, guidance=2.0)


@pytest.mark.filterwarnings("ignore:.*repeated")
def test_conditions_may_be_images_and_dictionaries():
    class Superresolution(torch.nn.Module):
        def forward(self, mu, t, cond):
            coarse = torch.nn.functional.interpolate(cond["image"], scale_factor=2.0)
            return coarse - mu + cond["label"][:, None, None, None]

    model = bsi.Model(Superresolution(), bsi.VDM(), shape=(1, 4, 4), parametrization="edm")
    generator = torch.Generator().manual_seed(6)
    image, label = torch.randn(5, 1, 2, 2, generator=generator), torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    x = torch.nn.functional.interpolate(image, scale_factor=2.0)
    assert model(x, {"image": image, "label": label}).shape == (5,)
    whole = model.sample(5, steps=3, cond={"image": image, "label": label})
    split = model.sample(5, steps=3, cond={"image": image, "label": label}, batch_size=2)
    torch.testing.assert_close(whole, split)
    assert model.elbo(x, {"image": image, "label": label}, batch_size=2).nats.shape == (5,)


# Evaluation


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_bound_is_reproducible_and_independent_of_the_training_mode(method):
    class Dropped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, mu, t):
            return self.drop(mu)

    model = bsi.Model(Dropped(), method, shape=(4,))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(7))
    bounds = [model.train(mode).elbo(x, seed=3).nats for mode in (True, False)]
    assert torch.equal(*bounds)
    assert not torch.equal(bounds[0], model.elbo(x, seed=4).nats)
    model.train()
    model.sample(2, steps=2)
    assert model.training
