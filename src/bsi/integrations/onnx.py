"""The denoiser as an exported program and as an ONNX file, and such a file as a predictor.

    export_onnx(model, "denoiser.onnx")                                      # needs pip install "bsi[onnx]"
    predict = OnnxPredictor("denoiser.onnx")                                 # needs onnxruntime and no network code
    x = bsi.sampling.sample(model.method, predict, noise, grid, "ode2")

Both hold f(latent, level): preconditioning, precision encoding and network. Solvers are a few multiplications and stay
outside. The number of samples per call is free. Levels are float64.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.export import Dim, ExportedProgram

from bsi.errors import DataError, UsageError, extra
from bsi.model import Model


def export_denoiser(model: Model) -> ExportedProgram:
    """f(latent, level), or f(latent, level, label) for a network with labels, by `torch.export`.

    The program runs without the package's code: save it by `torch.export.save`, call `program.module()`.
    """
    inputs, free = _inputs(model)
    with torch.no_grad():
        return torch.export.export(model.denoiser.eval(), inputs, dynamic_shapes=free)


def export_onnx(model: Model, path: Path | str) -> None:
    """Write f(latent, level) or f(latent, level, label) as an ONNX file, with the weights in it."""
    with extra("onnx", "export_onnx"):
        import onnxscript  # noqa: F401  # the exporter needs it, and would fail later
    inputs, free = _inputs(model)
    names = ["latent", "level", "label"][: len(inputs)]
    with torch.no_grad():
        program = torch.onnx.export(
            model.denoiser.eval(), inputs, input_names=names, output_names=["x_hat"], dynamo=True, verbose=False,
            dynamic_shapes=free, external_data=False,
        )  # fmt: skip
    assert program is not None
    program.save(str(path))


def _inputs(model: Model) -> tuple[tuple[Tensor, ...], tuple[dict[int, Dim], ...]]:
    """Inputs for two samples, and their free axes: the first of each is the number of samples."""
    if model.dtype != torch.float32:
        raise UsageError(f"exports compute in float32, got a model in {model.dtype}. Use model.float().")
    latent = torch.zeros(2, *model.latent_shape, device=model.device)
    level = torch.full((2,), model.method.levels.high, dtype=torch.float64, device=model.device)
    labels = (torch.zeros(2, dtype=torch.int64, device=model.device),) if model.classes else ()
    inputs = (latent, level, *labels)
    return inputs, ({0: Dim("batch")},) * len(inputs)


class OnnxPredictor:
    """An ONNX file of `export_onnx` as a predictor, computed by onnxruntime on the CPU.

    Args:
        path: The file.
        label: The class of all samples, for a network with labels.
    """

    def __init__(self, path: Path | str, label: int | None = None) -> None:
        with extra("onnx", "OnnxPredictor"):
            import onnxruntime
        if not Path(path).is_file():
            raise DataError(f"there is no ONNX file at {path}. Write one by bsi.integrations.onnx.export_onnx.")
        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        takes = {one.name for one in self.session.get_inputs()}
        if ("label" in takes) != (label is not None):
            need = "needs a label" if "label" in takes else "has no labels"
            raise UsageError(f"the network of {path} {need}, got label={label}.")
        self.label = label

    def __call__(
        self, latent: Float[Tensor, "batch *data"], level: Float[Tensor, " batch"]
    ) -> Float[Tensor, "batch *data"]:
        inputs = {"latent": latent.float().numpy(), "level": level.double().expand(len(latent)).numpy()}
        if self.label is not None:
            inputs["label"] = torch.full((len(latent),), self.label).numpy()
        return torch.from_numpy(self.session.run(None, inputs)[0]).to(latent.dtype)
