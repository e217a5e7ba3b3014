"""Models of latents: the autoencoder, its dataset, images from every command, and the bound of images."""

import copy
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import bsi
import bsi.codec
from bsi.backbones import AutoencoderConfig, build, compile_regions, cost
from bsi.backbones.costs import training_memory
from bsi.cli import main
from bsi.cli.data import make_source
from bsi.data import open_dataset
from bsi.data.store import AUTOENCODER
from bsi.errors import BsiError, CorruptCheckpoint, UsageError
from bsi.evaluation.samples import drawn_images
from bsi.objective import PIXEL, reconstruction_error
from bsi.recipe import Data, Every
from bsi.runtime.autoencoders import StoredAutoencoder, open_autoencoder
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import read_trained
from bsi.values import Latents

diffusers = pytest.importorskip("diffusers", reason='diffusers is not installed: pip install "bsi[diffusers]"')

TINY = AutoencoderConfig(channels=2, widths=(8, 12), blocks=1)
STEPS = 4


def run_ae(out: Path, steps: int = 100) -> None:
    every = Every(journal=50, evaluate=0, sample=0, checkpoint=0)
    bsi.train(replace(bsi.recipes.autoencoder_mini(), steps=steps, every=every), out=out, device="cpu")


def train(out: Path, steps: int = STEPS) -> bsi.Run:
    every = Every(journal=1, evaluate=2, sample=2, checkpoint=2)
    recipe = replace(bsi.recipes.latents_mini(), data=Data("digits-latents"), steps=steps, every=every)
    return bsi.train(replace(recipe, evaluation=replace(recipe.evaluation, images=8)), out=out, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of an autoencoder, latents of the digits in $BSI_DATA, and a run that is trained on them."""
    root = tmp_path_factory.mktemp("latents")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BSI_DATA", str(root / "data"))
        run_ae(root / "ae")
        assert main(["data", "latents", "--from", "digits", "--autoencoder", str(root / "ae")]) == 0
        train(root / "run")
    return root


@pytest.fixture
def root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BSI_DATA", str(folder / "data"))
    return folder


# ---- The autoencoder -------------------------------------------------------------------------------------------------


def test_an_autoencoder_has_latents_of_unit_power_and_any_size_of_image() -> None:
    torch.manual_seed(0)
    network = build(TINY, (3, 8, 8), 256).eval()
    x = torch.rand(5, 3, 16, 24) * 2 - 1  # larger than it was built for
    mean, std = network.encode(x)
    assert mean.shape == (5, 2, 4, 6)
    assert torch.allclose(mean.square().mean((1, 2, 3)), torch.ones(5), atol=1e-3)
    assert bool((std == TINY.noise).all())
    assert network.decode(mean).shape == x.shape
    inputs = torch.rand(2, 3, 8, 8), torch.rand(2)
    assert torch.equal(network(*inputs), network(*inputs)), "without noise in evaluation"
    nn.init.normal_(network.decoder[-1].conv.weight)
    assert not torch.equal(network.train()(*inputs), network(*inputs)), "with noise in training"


def test_its_cost_is_counted() -> None:
    network, found = build(TINY, (3, 16, 8), 256), cost(TINY, (3, 16, 8), 256)
    assert found.parameters == sum(p.numel() for p in network.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(3, 3, 16, 8), torch.zeros(3))
    assert counter.get_total_flops() == 3 * found.flops
    assert training_memory(TINY, (3, 16, 8), 256).per_image > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's own access
def test_the_regions_of_the_autoencoder_compile_to_one_graph_each(unchecked: None) -> None:
    torch.manual_seed(0)
    network = build(TINY, (3, 8, 8), 256).train()
    nn.init.normal_(network.decoder[-1].conv.weight)
    compiled, found = copy.deepcopy(network), []
    compile_regions(compiled, backend="aot_eager")
    for each in (network, compiled):
        torch.manual_seed(1)
        output = each(torch.ones(2, 3, 8, 8), torch.zeros(2))
        gradients = torch.autograd.grad(output.square().sum(), list(each.parameters()))
        found.append(torch.cat([output.detach().flatten(), *(g.flatten() for g in gradients)]))
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


def test_its_loss_is_that_of_a_laplace_decoder() -> None:
    generator = torch.Generator().manual_seed(0)
    x, error = torch.zeros(2, 1, 64, 64), torch.tensor([0.5, 0.05]).view(2, 1, 1, 1)
    x_hat = error * torch.randn(x.shape, generator=generator)
    b = (x - x_hat).abs().mean((1, 2, 3))
    nats = torch.distributions.Laplace(x_hat, b.view(2, 1, 1, 1)).log_prob(x).mean((1, 2, 3)) + math.log(PIXEL)
    assert torch.allclose(reconstruction_error(x, x_hat), -2 * nats, atol=0.2)


# ---- Datasets of latents ---------------------------------------------------------------------------------------------


def test_latents_are_stored_with_their_noise_and_standardized(root: Path) -> None:
    latents, digits = open_dataset("digits-latents"), open_dataset("digits")
    kind = latents.kind
    assert isinstance(kind, Latents)
    assert (latents.shape, kind.latent_shape(latents.shape), kind.shape) == ((8, 4, 4), (4, 4, 4), (1, 8, 8))
    assert (kind.images, kind.version, kind.bins) == ("digits", digits.version, digits.bins)
    assert np.array_equal(latents.labels.test, digits.labels.test)
    stored = torch.tensor(latents.train)
    drawn, again = kind.values(stored), kind.values(stored)
    assert torch.allclose(drawn.mean((0, 2, 3)), torch.zeros(4), atol=0.02)
    assert torch.allclose(drawn.std((0, 2, 3)), torch.ones(4), atol=0.02)
    std = stored[:, 4:] / torch.tensor(kind.std).view(-1, 1, 1)
    assert float((drawn - again).square().mean() / (2 * std.square().mean())) == pytest.approx(1, abs=0.05)


def test_the_autoencoder_travels_with_the_dataset_the_run_and_the_export(root: Path, tmp_path: Path) -> None:
    wanted = open_autoencoder(root / "ae").sha256
    for path in (root / "data" / "digits-latents" / AUTOENCODER, root / "run" / AUTOENCODER):
        assert open_autoencoder(path).sha256 == wanted
    model, images = bsi.load(root / "run"), torch.tensor(open_dataset("digits").test[:4])
    samples = model.sample(3, steps=2, seed=1)
    assert (samples.dtype, samples.shape, model.shape) == (torch.uint8, (3, 1, 8, 8), (1, 8, 8))
    x = model.decoded(model.values(images))
    assert torch.equal(model.data(model.values(images)), model.bins.indices(x))
    assert float((x - model.bins.values(images)).abs().mean()) < 0.35, "trained for 100 steps"
    assert copy.deepcopy(model).autoencoder is model.autoencoder
    for saved in (
        bsi.runtime.export.export(root / "run", tmp_path / "a.safetensors"),
        model.save_pretrained(tmp_path / "b"),
    ):
        assert torch.equal(bsi.load(saved).sample(3, steps=2, seed=1), samples)


def test_a_resumed_run_draws_the_same_latents(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step-00000004")
    (tmp_path / "again" / "checkpoints" / "latest").write_text("step-00000002\n")
    train(tmp_path / "again")
    a, b = (read_trained(path, ema=False).weights for path in (root / "run", tmp_path / "again"))
    assert all(torch.equal(a[name], b[name]) for name in a)


# ---- Images from every command ---------------------------------------------------------------------------------------


def test_commands_show_images(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(root / "run")
    assert main(["sample", run, "--num", "4", "--steps", "2", "--out", str(tmp_path / "s.png"), "--device", "cpu"]) == 0
    assert (
        main(["sample", run, "--num", "4", "--steps", "2", "--animate", str(tmp_path / "s.gif"), "--device", "cpu"])
        == 0
    )
    assert main(["report", run, "--out", str(tmp_path / "r.html"), "--device", "cpu"]) == 0
    assert "bits/dim" in (tmp_path / "r.html").read_text()
    capsys.readouterr()
    assert main(["eval", run, "--bpd", "--limit", "16", "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["dataset"], record["binned"], record["images"]) == ("digits", True, 16)
    assert record["bits_per_dim"] == pytest.approx(record["measurement"] + record["reconstruction"])
    assert record["baselines"].keys() == {"histogram", "PNG", "WebP"}
    model, alone = bsi.load(run), World(Place(), torch.device("cpu"))
    (images,) = drawn_images(model, bsi.Sampler(steps=2), 4, alone, 8)
    assert (images.shape, images.dtype) == ((4, 3, 8, 8), torch.uint8)
    assert any((root / "run" / "samples").glob("*.png"))


def test_the_page_shows_images(root: Path) -> None:
    pytest.importorskip("pydantic", reason="pip install 'bsi[view]'")
    from bsi.app.workbench import Request, open_workbench

    bench = open_workbench(root / "run", "run", torch.device("cpu"))
    assert bench.about["modes"] == ("draw",)
    request = Request(kind="draw", seed=0, num=2, evaluations=3, solver="ode2", grid="edm")
    assert {frame.x_hat.shape for frame in bench.frames(request)} == {(2, 1, 8, 8)}


# ---- The bound -------------------------------------------------------------------------------------------------------


class Linear:
    """x_hat = z W^T for images of 1 x 2 x 2 pixels and latents of 2 x 1 x 1 numbers, with the exact posterior of z."""

    def __init__(self, weight: torch.Tensor, precision: float) -> None:
        self.weight, self.covariance = weight, torch.linalg.inv(torch.eye(2) + precision * weight.T @ weight)
        self.gain = precision * self.covariance @ weight.T
        assert float((self.covariance - torch.diag(self.covariance.diag())).abs().max()) < 1e-6, "q is diagonal"

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = (x.flatten(1) @ self.gain.T).view(-1, 2, 1, 1)
        return mean, self.covariance.diag().sqrt().view(1, 2, 1, 1).expand_as(mean)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return (z.flatten(1) @ self.weight.T).view(-1, 1, 2, 2)


class Exact(nn.Module):
    """The network whose denoiser is the exact predictor of N(0, I): 0, as the data has the deviation sigma_data."""

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def test_the_bound_of_a_linear_gaussian_autoencoder_is_the_likelihood() -> None:
    """p(x) = N(0, W W^T + I / precision), and q(z | x) is the posterior: the bound is tight up to the prior's own."""
    precision, count = 400.0, 4001
    weight = torch.tensor([[0.3, 0.1], [0.3, -0.1], [0.3, 0.1], [0.3, -0.1]])  # orthogonal columns
    coder, bins = Linear(weight, precision), bsi.Bins(-1.0, 1.0, count)
    kind = Latents(0.0, 1.0, (1, 2, 2), count, precision, "linear", "", "")
    kind = replace(kind, mean=(0.0, 0.0), std=(1.0, 1.0))
    method = bsi.BSI(lambda_0=1e-3, alpha_M=1e5)
    model = bsi.Model(Exact(), method, (4, 1, 1), data=kind, sigma_data=1.0, autoencoder=coder)
    generator = torch.Generator().manual_seed(0)
    z, eps = torch.randn(2500, 2, generator=generator), torch.randn(2500, 4, generator=generator)
    x = (0.5 * z @ weight.T + 0.5 * precision**-0.5 * eps).clamp(-1, 1).view(-1, 1, 2, 2)  # away from the ends
    index = bins.indices(x)
    p = torch.distributions.MultivariateNormal(torch.zeros(4), weight @ weight.T + torch.eye(4) / precision)
    exact = -p.log_prob(bins.values(index).flatten(1)) - 4 * math.log(bins.width)
    found = model.elbo(index, measure=20, recon=4)
    assert found.n == 4
    assert found.binned
    excess = found.bits_per_dim - float(exact.mean()) / (4 * math.log(2))
    own = 2 * method.c / 2 / (4 * math.log(2))  # of BSI's random first belief, for two latents of variance 1
    assert abs(excess - own) < 4 * found.monte_carlo_error
    assert found.monte_carlo_error < 0.02
    # A worse encoder has a looser bound, by its KL divergence from the posterior.
    coder.covariance = 4 * coder.covariance
    kl = 2 * (0.5 * (4 - 1) - math.log(2)) / (4 * math.log(2))
    looser = model.elbo(index, measure=20, recon=4)
    assert abs(float(looser) - float(exact.mean()) / (4 * math.log(2)) - own - kl) < 4 * looser.monte_carlo_error


def test_the_error_of_the_bound_is_its_spread(root: Path) -> None:
    model, images = bsi.load(root / "run"), torch.tensor(open_dataset("digits").test[:24])
    found = [model.elbo(images, seed=seed) for seed in range(24)]
    for part in ("measurements", "reconstructions"):
        replicates = [getattr(each, part) for each in found]
        spread = np.std([float(each.mean.mean()) for each in replicates], ddof=1)
        expected = math.sqrt(np.mean([each.sum_variance for each in replicates])) / len(images)
        assert 0.6 < spread / expected < 1.5, part
    expected = math.sqrt(np.mean([each.monte_carlo_error**2 for each in found]))
    target = model.elbo(images, target_error=expected / 2)
    assert target.monte_carlo_error < expected / 1.4


# ---- Bad input -------------------------------------------------------------------------------------------------------


def plan(images: object, autoencoder: object) -> object:
    return make_source("latents", str(images), {"autoencoder": str(autoencoder)}).plan()


def test_unsupported_images_are_rejected_before_any_work(root: Path, tmp_path: Path) -> None:
    for name, array in {"odd": -np.ones((20, 1, 7, 7)), "color": -np.ones((20, 3, 8, 8))}.items():
        np.save(tmp_path / f"{name}.npy", array)
        words = ["data", "arrays", "--from", str(tmp_path / f"{name}.npy"), "--to", str(tmp_path / name)]
        assert main([*words, "--bins", "-1", "1", "256"]) == 0
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    for images, autoencoder, message in (
        (tmp_path / "odd", root / "ae", "multiples of 2"),
        (tmp_path / "color", root / "ae", "--channels 1"),
        ("digits-latents", root / "ae", "expected images"),
        ("digits", root / "run", "not an autoencoder"),
        ("digits", tmp_path / "empty", "An autoencoder is"),
        ("digits", tmp_path, "UNet2DModel, not an autoencoder"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            plan(images, autoencoder)
    with pytest.raises(UsageError, match="--autoencoder RUN"):
        make_source("latents", "digits", {}).plan()


def test_another_autoencoder_than_that_of_the_latents_is_rejected(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    path = tmp_path / "run" / AUTOENCODER
    stored = open_autoencoder(path)
    weights = {name: tensor + 1e-3 for name, tensor in stored.tensors().items()}
    StoredAutoencoder.of(stored.about, weights, "").save(path)
    with pytest.raises(CorruptCheckpoint, match="not the one of the latents"):
        bsi.load(tmp_path / "run")
    path.write_bytes(b"damaged")
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        bsi.load(tmp_path / "run")
    path.unlink()
    with pytest.raises(BsiError, match=AUTOENCODER):
        bsi.load(tmp_path / "run")


def test_an_autoencoder_is_no_model_and_latents_are_no_images(root: Path) -> None:
    coder, model, images = bsi.load(root / "ae"), bsi.load(root / "run"), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    for use in (lambda: coder.sample(2), lambda: coder.elbo(images), lambda: coder(images)):
        with pytest.raises(UsageError, match="autoencoder"):
            use()
    for use in (
        lambda: model.denoise(torch.zeros(2, 1, 8, 8), 1.0),
        lambda: model.inpaint(images, torch.ones(1, 8, 8)),
        lambda: model.restore(torch.zeros(2, 1, 8, 8), lambda x: x, 1.0),
        lambda: model.log_likelihood(images),
        lambda: bsi.codec.compress(model, images, 4),
    ):
        with pytest.raises(UsageError, match="images themselves"):
            use()
    with pytest.raises(UsageError, match="belong together"):
        bsi.Model(nn.Identity(), bsi.BSI(), (8, 4, 4), data=model.kind)
    mini = bsi.recipes.autoencoder_mini()
    with pytest.raises(UsageError, match="trained on images"):
        bsi.train(replace(mini, data=Data("digits-latents")), out=root / "wrong", device="cpu")
    with pytest.raises(UsageError, match="objective"):
        replace(bsi.recipes.autoencoder_mini(), backbone=bsi.recipes.digits().backbone)


# ---- diffusers -------------------------------------------------------------------------------------------------------


def kl() -> nn.Module:
    return diffusers.AutoencoderKL(
        in_channels=1, out_channels=1, down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=3,
        up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(8, 16), norm_num_groups=4, sample_size=8,
    )  # fmt: skip


def tiny() -> nn.Module:
    widths = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    return diffusers.AutoencoderTiny(in_channels=1, out_channels=1, latent_channels=3, **widths, **blocks)


@pytest.mark.parametrize("make", [kl, tiny])
def test_autoencoders_of_diffusers_encode_from_a_local_folder(
    make, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = make().eval()
    network.save_pretrained(tmp_path / "ae")
    words = ["--from", "digits", "--autoencoder", str(tmp_path / "ae"), "--to", str(tmp_path / "latents")]
    assert main(["data", "latents", *words]) == 0
    dataset = open_dataset(tmp_path / "latents")
    images = torch.tensor(open_dataset("digits").train[:3])
    x = dataset.kind.bins.values(images)
    with torch.no_grad():
        mean = network.encode(x).latent_dist.mean if make is kl else network.encode(x).latents
        decoded = network.decode(mean).sample
    assert torch.allclose(torch.tensor(dataset.train[:3, :3]), mean, atol=1e-5)
    stored = open_autoencoder(tmp_path / "latents" / AUTOENCODER)
    assert torch.allclose(stored.decode(mean), decoded, atol=1e-5)
    backbone = build("unet-8x1", (3, 4, 4))
    model = bsi.Model(backbone, bsi.BSI(alpha_M=1e4), dataset.shape, data=dataset.kind, autoencoder=stored)
    loaded = bsi.load(model.save_pretrained(tmp_path / "model"))
    assert torch.equal(loaded.sample(2, steps=2), model.sample(2, steps=2))
    if make is kl:
        assert math.isfinite(float(model.elbo(images)))
    else:
        assert bool((torch.tensor(dataset.train[:, 3:]) == 0).all())
        with pytest.raises(UsageError, match="no distribution"):
            model.elbo(images)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UsageError, match=r"bsi\[diffusers\]"):
        open_autoencoder(tmp_path / "ae")
