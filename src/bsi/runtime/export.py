"""A trained model, back: from a run folder, or from one exported file that needs neither run nor trainer.

    model = bsi.load("runs/digits")                 # the EMA of the latest checkpoint, verified
    images = model.sample(16)

An export is one safetensors file: the weights, and in its metadata the recipe and the data's description as JSON.
Neither can hold code; a network that is not one of ours is never imported by name, but passed in: `bsi.load(run,
backbone=MyNet())`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from bsi import pretrained
from bsi.errors import CorruptCheckpoint, UsageError
from bsi.io import atomic, check_writable, share
from bsi.model import Model
from bsi.recipe import Recipe
from bsi.runtime import checkpoint
from bsi.runtime.data_spec import DataSpec, build_model
from bsi.runtime.ema import reconstruct
from bsi.runtime.run_folder import RunFolder
from bsi.runtime.serialization import from_plain, to_plain

__all__ = ["Trained", "class_name", "export", "load", "model_of", "read_trained"]

EXPORT_FORMAT = 1
MODEL_FILE = "model.safetensors"  # in a folder as the Hugging Face hub holds it
METADATA = "bsi"
MOST_SHOWN = 3  # runs that may have been meant


@dataclass(frozen=True)
class Trained:
    """Weights by name, and what they are the weights of."""

    recipe: Recipe
    data: DataSpec
    network: str
    step: int
    weights: Mapping[str, Tensor]


def class_name(network: nn.Module) -> str:
    """The class of a network, as a person would look for it."""
    return f"{type(network).__module__}.{type(network).__qualname__}"


def load(path: str | Path, ema: bool = True, backbone: nn.Module | None = None, step: int | None = None) -> Model:
    """The model of a run folder, an exported file or a bundled name (`digits`), on the CPU and in evaluation mode.

    `ema=False` takes the weights themselves, `step` an earlier checkpoint; `backbone` is your own network, if the run
    was trained with it.
    """
    return model_of(read_trained(Path(path), ema, step), str(path), backbone)


def model_of(trained: Trained, where: str, backbone: nn.Module | None = None) -> Model:
    """The model that weights belong to, as `load` returns it; `where` they were read from is for its messages."""
    if trained.recipe.backbone is None and backbone is None:
        raise UsageError(
            f"{where} was trained with a network that you passed, {trained.network}, and holds its weights alone: pass "
            f"one like it again, backbone={trained.network.rpartition('.')[2]}(...)"
        )
    if backbone is not None and trained.recipe.backbone is not None:
        raise UsageError(f"{where} has a network of its own ({trained.network}): leave backbone out")
    model = build_model(trained.recipe, trained.data, backbone)
    set_weights(model, trained, where)
    return model.eval()


def set_weights(model: Model, trained: Trained, where: str) -> None:
    """Put weights into a model whose network must be the same, tensor by tensor."""
    found = checkpoint.differences(trained.weights, model.denoiser.backbone.state_dict())
    if found:
        theirs = trained.network or str(trained.recipe.backbone)
        raise UsageError("\n".join([f"the weights of {where} are those of another network, {theirs}:", *found]))
    model.denoiser.backbone.load_state_dict(dict(trained.weights))


def read_trained(path: Path, ema: bool = True, step: int | None = None) -> Trained:
    """Weights and their description, from a run folder, an exported file or a bundled name."""
    path = pretrained.find(path)
    if path.is_file():
        return _read_export(path, step)
    if (path / MODEL_FILE).is_file():
        return _read_export(path / MODEL_FILE, step)
    root = RunFolder(path).checkpoints
    found = checkpoint.find(root, lambda line: print(line, file=sys.stderr), step) if root.is_dir() else None
    if found is None and str(path) in pretrained.BUNDLED:
        raise UsageError(
            f"there is a folder {path} here, which holds no run and hides the network of that name that comes with the "
            f"package: rename the folder, or run in another one."
        )
    if found is None:
        raise UsageError(
            f"{path} is neither a run folder with a checkpoint nor an exported file. {_instead(path)}`bsi train` makes "
            f"one; {', '.join(pretrained.BUNDLED)} comes with the package."
        )
    return _described(found.state, checkpoint.read_tensors(found, "ema" if ema else "model"))


def _instead(path: Path) -> str:
    """What may have been meant: a run or an export of almost that name, or one of those in the folder."""
    inside, beside = _trained_in(path), {found.name: found for found in _trained_in(path.parent)}
    near = [str(beside[name]) for name in difflib.get_close_matches(path.name, beside, n=1)]
    meant = [str(found) for found in inside[:MOST_SHOWN]] or near
    return f"Did you mean {' or '.join(meant)}? " if meant else ""


def _trained_in(folder: Path) -> list[Path]:
    """Run folders and exports in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.suffix == ".safetensors" or RunFolder(p).checkpoints.is_dir()]
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)


def _described(given: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Trained:
    recipe, data = from_plain(Recipe, given["recipe"], "recipe"), from_plain(DataSpec, given["data"], "data")
    return Trained(recipe, data, str(given["network"]), int(given["step"]), weights)


def _begins_well(path: Path) -> bool:
    """Whether a file begins as safetensors do: the length of a header in eight bytes, and a JSON object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _read_export(path: Path, step: int | None) -> Trained:
    if step is not None:
        raise UsageError(f"{path} is one exported file: it holds one step alone. Leave step out.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        if _begins_well(path):
            raise CorruptCheckpoint(
                f"{path} is damaged, or not whole ({error}). Copy it again, or make it again by `bsi export`."
            ) from error
        raise CorruptCheckpoint(
            f"{path} is not a safetensors file ({error}). Pickles (.pt, .pth, .ckpt) can run code when they are "
            f"loaded; bsi never loads them."
        ) from error
    try:
        given = json.loads(metadata[METADATA])
        if given["format"] != EXPORT_FORMAT:
            raise UsageError(f"{path} has export format {given['format']!r}; this version reads {EXPORT_FORMAT}.")
        return _described(given, weights)
    except (KeyError, ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} does not say which model it holds: it was not written by `bsi export`.") from error


def export(
    run: str | Path,
    out: str | Path | None = None,
    ema: bool = True,
    step: int | None = None,
    sigma_rel: float | None = None,
) -> Path:
    """Write a run's EMA (or its weights, or an average of relative width `sigma_rel`) as one file, by default in its
    folder; what has none, a bundled network or an exported file, in the current one.
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
    about = {
        "format": EXPORT_FORMAT,
        "recipe": to_plain(trained.recipe),
        "data": to_plain(trained.data),
        "network": trained.network,
        "step": trained.step,
        "ema": ema,
        "sigma_rel": sigma_rel,
    }
    with atomic(target, "--out") as temporary:
        safetensors.torch.save_file(dict(trained.weights), temporary, {METADATA: json.dumps(about)})
        share(temporary)
    return target
