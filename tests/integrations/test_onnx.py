"""The denoiser as an exported program and as an ONNX file."""

from pathlib import Path

import pytest
import torch

import bsi
from bsi import sampling
from bsi.backbones import DiTConfig, MLPConfig, UNetConfig, build
from bsi.errors import DataError, UsageError
from bsi.grids import edm_grid
from bsi.integrations.onnx import OnnxPredictor, export_denoiser, export_onnx
from bsi.rng import SeededNoise

NETWORKS = {
    "dit": (DiTConfig(32, 2, 2), (3, 8, 8), 3),
    "mlp": (MLPConfig(32, 2), (6,), 0),
    "unet": (UNetConfig(16, 1, coarser=(16,)), (3, 4, 4), 0),
}
pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.filterwarnings("ignore")]


def trained(kind: str) -> bsi.Model:
    """A network with no weight at 0."""
    config, shape, classes = NETWORKS[kind]
    torch.manual_seed(0)
    network = build(config, shape, 256, classes)
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.05)
    return bsi.Model(network, bsi.BSI(alpha_M=1e4), shape, data=bsi.Bins.uint8()).eval()


@pytest.mark.parametrize("kind", ["dit", "mlp", pytest.param("unet", marks=pytest.mark.slow)])
def test_an_exported_program_computes_the_denoiser_for_any_number_of_samples(kind: str, tmp_path: Path) -> None:
    model = trained(kind)
    torch.export.save(export_denoiser(model), tmp_path / "denoiser.pt2")
    program = torch.export.load(tmp_path / "denoiser.pt2").module()
    for count in (2, 5):
        level = torch.logspace(-2, 3, count, dtype=torch.float64) + 0.01
        inputs = (torch.randn(count, *model.shape), level, *([torch.arange(count) % 4] if model.classes else []))
        with torch.no_grad():
            torch.testing.assert_close(program(*inputs), model.denoiser(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["dit", "mlp", pytest.param("unet", marks=pytest.mark.slow)])
def test_onnxruntime_samples_with_the_predictions_of_torch(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason='onnx is not installed: pip install "bsi[onnx]"')
    pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "bsi[onnx]"')
    model, path = trained(kind), tmp_path / "denoiser.onnx"
    export_onnx(model, path)
    assert list(tmp_path.iterdir()) == [path], "one file, with the weights in it"
    label = 1 if model.classes else None
    ours = model.denoiser.given(None if label is None else torch.full((3,), label))
    theirs = OnnxPredictor(path, label)
    # The same latents: an untrained network amplifies the differences of rounding from step to step.
    noise = SeededNoise(0, torch.arange(3), model.shape)
    steps = list(sampling.trajectory(model.method, theirs, noise, edm_grid(model.method, 8), "ode2"))
    assert len(steps) > 8
    for step in steps:
        with torch.no_grad():
            expected = ours(step.latent, step.level.expand(3))
        torch.testing.assert_close(step.x_hat, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="label"):
        OnnxPredictor(path, None if model.classes else 0)


def test_unsupported_exports_raise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="float32"):
        export_denoiser(trained("mlp").double())
    pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "bsi[onnx]"')
    with pytest.raises(DataError, match="export_onnx"):
        OnnxPredictor(tmp_path / "none.onnx")
