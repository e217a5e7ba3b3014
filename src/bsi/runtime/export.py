"""Models as files: loading them from a run folder or an exported file, and writing a run or any model as one file.

    model = bsi.load("runs/digits")                 # the EMA of the latest checkpoint, verified
    images = model.sample(16)

An export is a safetensors file: the weights, and in its metadata the recipe and the description of the data as JSON. A
model that no recipe trained has a `ModelSpec` in place of the recipe.
Neither can contain code. A network passed by the caller is never imported by name and must be passed again:
`bsi.load(run, backbone=MyNet())`. Before a network is built, its shapes are compared with those of the weights, so that
a small file cannot make the loader allocate a large network.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from bsi import __version__, pretrained
from bsi.errors import BsiError, CorruptCheckpoint, UsageError
from bsi.io import atomic, check_writable, share
from bsi.methods import METHODS
from bsi.model import Model
from bsi.progress import log
from bsi.recipe import Recipe
from bsi.runtime import checkpoint
from bsi.runtime.data_spec import DataSpec, ModelSpec, build_model, config_of
from bsi.runtime.ema import reconstruct
from bsi.runtime.run_folder import RunFolder
from bsi.runtime.serialization import from_plain, to_plain

EXPORT_FORMAT = 1
MODEL_FILE = "model.safetensors"  # the file name in a folder for the Hugging Face hub
METADATA = "bsi"
LARGEST_SAMPLE = 2**31  # largest number of values in one sample
MOST_SHOWN = 3  # largest number of suggestions in a message


@dataclass(frozen=True)
class Trained:
    """Weights by name, with the description of the model and of the data."""

    recipe: Recipe | ModelSpec
    data: DataSpec
    network: str
    step: int
    weights: Mapping[str, Tensor]

    @property
    def dataset(self) -> str:
        """The name of the dataset, or the path of its folder."""
        return self.recipe.data.name if isinstance(self.recipe, Recipe) else self.data.name

    @property
    def unfinished(self) -> str:
        """The step reached of how many, if training has not ended."""
        steps = self.recipe.steps if isinstance(self.recipe, Recipe) else 0
        return f"step {self.step} of {steps}" if self.step < steps else ""

    def about(self, ema: bool, sigma_rel: float | None = None) -> dict[str, Any]:
        """The JSON in the metadata of an export."""
        kind = "recipe" if isinstance(self.recipe, Recipe) else "model"
        return {
            "format": EXPORT_FORMAT,
            "bsi": __version__,
            kind: to_plain(self.recipe),
            "data": to_plain(self.data),
            "network": self.network,
            "step": self.step,
            "ema": ema,
            "sigma_rel": sigma_rel,
        }


def described(model: Model, name: str) -> Trained:
    """A model as what `read_trained` would read from its file.

    A model that was loaded keeps its recipe, its step and the description of its data, if it has not been changed.
    """
    network = getattr(model.denoiser.backbone, "_orig_mod", model.denoiser.backbone)  # of a compiled network
    if type(model.method) not in METHODS.values():
        raise UsageError(
            f"the method {model.method!r} could not be loaded again by its name. Register it first: "
            f"bsi.methods.register(name, {type(model.method).__name__})."
        )
    data = DataSpec("", "", 0, model.shape, model.kind, model.classes or 0, model.class_names)
    config = config_of(network, data)
    recipe: Recipe | ModelSpec = ModelSpec(
        name, model.method, config, model.denoiser.parametrization, model.denoiser.sigma_data
    )
    known, step = model.origin, 0
    if isinstance(known, Trained) and (known.recipe.method, known.recipe.backbone) == (model.method, config):
        recipe, data, step = known.recipe, known.data, known.step
    weights = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in network.state_dict().items()}
    return Trained(recipe, data, "" if config is not None else class_name(network), step, weights)


def class_name(network: nn.Module) -> str:
    """The full name of a network's class."""
    return f"{type(network).__module__}.{type(network).__qualname__}"


def load(
    path: str | PathLike[str], ema: bool = True, backbone: nn.Module | None = None, step: int | None = None
) -> Model:
    """Load a model onto the CPU, in evaluation mode.

    Args:
        path: A run, its folder, an exported file, or the name of a bundled network (`digits`).
        ema: Load the moving average; otherwise the weights themselves.
        backbone: Your own network, if the run was trained with one.
        step: The step of the checkpoint. By default the latest.
    """
    return model_of(read_trained(Path(path), ema, step), fspath(path), backbone)


def model_of(trained: Trained, where: str, backbone: nn.Module | None = None) -> Model:
    """Build the model of trained weights, in evaluation mode; error messages name `where` they were read from."""
    if trained.recipe.backbone is None and backbone is None:
        raise UsageError(
            f"{where} was trained with your own network, {trained.network}, and has only its weights. Pass one like it "
            f"again, backbone={trained.network.rpartition('.')[2]}(...)."
        )
    if backbone is not None and trained.recipe.backbone is not None:
        raise UsageError(f"{where} describes its network itself. Leave backbone out.")
    _check_shapes(trained, where)
    model = build_model(trained.recipe, trained.data, backbone)
    set_weights(model, trained, where)
    model.origin = replace(trained, weights={})
    return model.eval()


def _check_shapes(trained: Trained, where: str) -> None:
    """Raise if the recipe describes another network than that of the weights, before its memory is allocated."""
    config, data = trained.recipe.backbone, trained.data
    if config is None:
        return
    deep = max(getattr(config, "depth", 0), getattr(config, "levels", 0))
    if deep > len(trained.weights) or math.prod(data.shape) > LARGEST_SAMPLE:
        raise CorruptCheckpoint(f"{where} is damaged: its weights are not those of {config} for shape {data.shape}.")
    with torch.device("meta"):
        network = data.build(config)
    _check_same(trained, network.state_dict(), where)


def _check_same(trained: Trained, here: Mapping[str, Tensor], where: str) -> None:
    if found := checkpoint.differences(trained.weights, here):
        theirs = trained.network or str(trained.recipe.backbone)
        raise UsageError("\n".join([f"the weights of {where} are those of another network, {theirs}:", *found]))


def set_weights(model: Model, trained: Trained, where: str) -> None:
    """Copy weights into a model, whose network must have the same tensors."""
    _check_same(trained, model.denoiser.backbone.state_dict(), where)
    model.denoiser.backbone.load_state_dict(dict(trained.weights))


def read_trained(path: Path, ema: bool = True, step: int | None = None) -> Trained:
    """Weights and their description, from a run folder, an exported file or the name of a bundled network."""
    path = pretrained.find(path)
    if path.is_file():
        return _read_export(path, step)
    if (path / MODEL_FILE).is_file():
        return _read_export(path / MODEL_FILE, step)
    root = RunFolder(path).checkpoints
    while (found := checkpoint.find(root, log, step) if root.is_dir() else None) is not None:
        try:
            return _described(found.state, checkpoint.read_tensors(found, "ema" if ema else "model"))
        except (OSError, safetensors.SafetensorError):
            if found.folder.exists():
                raise
            # A running training has deleted this checkpoint, and has a newer one.
    if str(path) in pretrained.BUNDLED:
        raise UsageError(
            f"the folder {path} here is not a run, and hides the bundled network of that name. Rename it, or run in "
            f"another folder."
        )
    raise UsageError(
        f"{path} is neither a run folder with a checkpoint nor an exported file. {_instead(path)}`bsi train` makes "
        f"one; {', '.join(pretrained.BUNDLED)} comes with the package."
    )


def _instead(path: Path) -> str:
    """A suggestion: the runs and exports in the folder, or one of a similar name next to it."""
    others = {found.name: found for found in _trained_in(path.parent)}
    others |= {name: Path(name) for name in pretrained.BUNDLED if path.name == str(path)}
    near = [others[name] for name in difflib.get_close_matches(path.name, others, n=1)]
    meant = _trained_in(path)[:MOST_SHOWN] or near
    return f"Did you mean {' or '.join(map(str, meant))}? " if meant else ""


def _trained_in(folder: Path) -> list[Path]:
    """Run folders and exports in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.suffix == ".safetensors" or RunFolder(p).checkpoints.is_dir()]
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)


def _described(given: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Trained:
    """The weights with their description; raises KeyError or TypeError if it is incomplete."""
    recipe: Recipe | ModelSpec
    if "model" in given:
        recipe = from_plain(ModelSpec, given["model"], "model")
    else:
        recipe = from_plain(Recipe, given["recipe"], "recipe")
    data = from_plain(DataSpec, given["data"], "data")
    return Trained(recipe, data, str(given["network"]), int(given["step"]), weights)


def _begins_well(path: Path) -> bool:
    """Whether a file begins like a safetensors file: the length of the header in eight bytes, then a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _read_export(path: Path, step: int | None) -> Trained:
    if step is not None:
        raise UsageError(f"{path} is an exported file, which holds a single step. Leave step out.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        if _begins_well(path):
            raise CorruptCheckpoint(
                f"{path} is damaged or incomplete ({error}). Copy it again, or make it again with `bsi export`."
            ) from error
        raise CorruptCheckpoint(
            f"{path} is not a safetensors file ({error}). Pickles (.pt, .pth, .ckpt) can run code when they are "
            f"loaded; bsi never loads them."
        ) from error
    given: dict[str, Any] = {}
    try:
        given = json.loads(metadata[METADATA])
        if given["format"] != EXPORT_FORMAT:
            raise UsageError(f"{path} has export format {given['format']!r}, and this version reads {EXPORT_FORMAT}.")
        return _described(given, weights)
    except BsiError as error:
        if (written := given.get("bsi", __version__)) == __version__:
            raise
        raise UsageError(
            f"{error} It was written by bsi {written!s:.20}, and this is {__version__}: pip install --upgrade bsi"
        ) from error
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} does not describe its model: it was not written by `bsi export`.") from error


def export(
    run: str | Path,
    out: str | Path | None = None,
    ema: bool = True,
    step: int | None = None,
    sigma_rel: float | None = None,
) -> Path:
    """Write a model as one file.

    Args:
        run: A run folder, an exported file, or the name of a bundled network.
        out: The file to write. By default NAME-STEP.safetensors in the run folder, or in the current folder.
        ema: Export the moving average; otherwise the weights themselves.
        step: The step of the checkpoint. By default the latest.
        sigma_rel: Export the power-function average of this relative width instead.
    """
    trained = read_trained(Path(run), ema, None if sigma_rel is not None else step)
    kind = "" if ema else "-weights"
    if sigma_rel is not None:
        end, weights = reconstruct(Path(run), sigma_rel, step)
        trained, kind = replace(trained, step=end, weights={**trained.weights, **weights}), f"-{sigma_rel:g}"
    name = f"{trained.recipe.name}-{trained.step}{kind}.safetensors"
    folder = Path(run) if Path(run).is_dir() else Path()
    target = folder / name if out is None else Path(out)
    check_writable(target, "--out")
    return write_export(target, trained, trained.about(ema, sigma_rel))


def write_export(path: Path, trained: Trained, about: Mapping[str, Any]) -> Path:
    """Write the file, atomically."""
    with atomic(path, "--out") as temporary:
        safetensors.torch.save_file(dict(trained.weights), temporary, {METADATA: json.dumps(about)})
        share(temporary)
    return path
