"""Networks and loops of diffusers with `BSIScheduler`: the losses, samples and bounds of `bsi.Model`."""

import pytest
import torch

import bsi
from bsi.errors import UsageError
from bsi.rng import SeededNoise

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed: pip install "bsi[diffusers]"')

from bsi.integrations.diffusers import BSIScheduler, DiffusersBackbone  # noqa: E402

SHAPE = (3, 8, 8)


def unet() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def dit() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=3, out_channels=3, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=10, norm_num_groups=1,
    )  # fmt: skip


def loop(network: torch.nn.Module, scheduler: BSIScheduler, eps: torch.Tensor, noise=None, **labels) -> torch.Tensor:
    """The usual sampling loop."""
    x = scheduler.init_noise_sigma * eps
    for t in scheduler.timesteps:
        output = network(scheduler.scale_model_input(x, t), t.expand(len(x)), **labels).sample
        x = scheduler.step(output, t, x, variance_noise=None if noise is None else noise(0.0, 1.0)).prev_sample
    return x


@pytest.mark.parametrize("solver", ["posterior", "ode2", "sde2"])
@pytest.mark.parametrize("make", [unet, dit])
@torch.no_grad()
def test_the_loop_of_diffusers_draws_the_samples_of_the_model(make, solver: str) -> None:
    network, labels = make().eval(), torch.tensor([3, 5])
    scheduler = BSIScheduler(solver=solver, grid="edm", sigma_data=0.5)
    scheduler.set_timesteps(12)
    given = {"class_labels": labels} if make is dit else {}
    noise = SeededNoise(4, torch.arange(2), SHAPE)
    found = loop(network, scheduler, noise(0.0, 0.0), None if solver == "ode2" else noise, **given)
    model = bsi.Model(DiffusersBackbone(network), bsi.BSI(), SHAPE, sigma_data=0.5)
    cond = labels if make is dit else None
    expected = model.sample(2, steps=12, solver=solver, grid="edm", noise="independent", seed=4, cond=cond)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("prediction_type", ["edm", "epsilon"])
def test_the_loss_is_the_models(prediction_type: str) -> None:
    network, x = unet(), torch.rand(6, *SHAPE) * 2 - 1
    scheduler = BSIScheduler(prediction_type=prediction_type)
    t, eps = torch.linspace(0.1, 1, 6, dtype=torch.float64), torch.randn_like(x)
    steps = 1000 * (1 - t)
    noisy = scheduler.add_noise(x, eps, steps)
    found = scheduler.loss(network(scheduler.scale_model_input(noisy, steps), steps).sample, x, noisy, steps)
    model = bsi.Model(DiffusersBackbone(network), bsi.BSI(), SHAPE, parametrization=prediction_type, sigma_data=0.5)
    torch.testing.assert_close(
        found, bsi.objective.training_loss(model.method, model.denoiser, x, t, eps), rtol=1e-4, atol=1e-6
    )


@pytest.mark.slow
def test_a_network_of_diffusers_learns_in_the_usual_loop() -> None:
    """Of two points, at 1 and -1 in all pixels, the samples of a trained network are near one or the other."""
    torch.manual_seed(0)
    network, scheduler = unet(), BSIScheduler(sigma_data=1.0, alpha_M=100.0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3)
    losses = []
    for _ in range(120):
        x = torch.sign(torch.randn(32, 1, 1, 1)).expand(32, *SHAPE)
        steps = scheduler.sample_timesteps(len(x))
        noisy = scheduler.add_noise(x, torch.randn_like(x), steps)
        output = network(scheduler.scale_model_input(noisy, steps), steps).sample
        loss = scheduler.loss(output, x, noisy, steps).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.4 * sum(losses[:10])
    scheduler.set_timesteps(16)
    with torch.no_grad():
        found = loop(network.eval(), scheduler, torch.randn(16, *SHAPE))
    assert (found.abs() - 1).abs().mean() < 0.3
    bound = bsi.Model(DiffusersBackbone(network), scheduler.method, SHAPE).elbo(x + 0.01 * torch.randn(x.shape))
    assert torch.isfinite(bound.nats).all(), "diffusers itself has no likelihood"


def test_the_scheduler_is_saved_and_loaded(tmp_path) -> None:
    scheduler = BSIScheduler(
        gamma_0=float("inf"), lambda_0=0.5, alpha_M=100.0, solver="sde2", prediction_type="epsilon"
    )
    scheduler.save_pretrained(tmp_path)
    again = BSIScheduler.from_pretrained(tmp_path)
    assert (again.method, again.config.solver, again.config.prediction_type) == (scheduler.method, "sde2", "epsilon")
    assert again.init_noise_sigma == 0.0
    assert BSIScheduler().init_noise_sigma == pytest.approx(10.0)


def test_generators_seed_the_noise_and_misuse_raises() -> None:
    scheduler, x = BSIScheduler(solver="posterior"), torch.zeros(2, *SHAPE)
    with pytest.raises(UsageError, match="set_timesteps"):
        scheduler.step(x, 1000.0, x)
    results = []
    for seed in (0, 0, 1):
        scheduler.set_timesteps(1)
        t, generator = scheduler.timesteps[0], torch.Generator().manual_seed(seed)
        results.append(scheduler.step(x, t, x, generator=generator, return_dict=False)[0])
    assert results[0].equal(results[1])
    assert not results[0].equal(results[2])
    scheduler.step(x, scheduler.timesteps[1], x)
    with pytest.raises(UsageError, match="set_timesteps again"):
        scheduler.step(x, scheduler.timesteps[1], x)
    with pytest.raises(UsageError, match="prediction_type"):
        BSIScheduler(prediction_type="v_prediction")
