"""Trained models: their description, building them, loading them from a run or a file, and writing them as one file.

    model = bsi.load("runs/digits")                 # the EMA of the latest checkpoint, verified
    images = model.sample(16)

An export is a safetensors file: the weights, and in its metadata the recipe and the description of the data as JSON. A
model of latents has those of its autoencoder too. A
model that no recipe trained has a `ModelSpec` in place of the recipe. Neither can contain code. A network passed by the
caller is never imported by name and must be passed again: `bsi.load(run, backbone=MyNet())`. Before a network is built,
its shapes are compared with those of the weights, so that a small file cannot make the loader allocate a large network.

A model can also be a folder, which `bsi.load` opens like a run and which the Hugging Face hub can hold:

    model.safetensors     an export
    config.json           the description in its metadata, for people and search
    README.md             a model card: the method, the data, and how to load it
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bsi import __version__
from bsi.backbones import build
from bsi.backbones.autoencoder import Autoencoder
from bsi.backbones.config import AutoencoderConfig, BackboneConfig
from bsi.backbones.dit import DiT
from bsi.backbones.layers import Backbone
from bsi.backbones.mlp import MLP
from bsi.backbones.unet import UNet
from bsi.errors import BsiError, CorruptCheckpoint, UsageError, extra
from bsi.io import atomic, check_writable, make_folder, read_tensors, write_json, write_tensors, write_text
from bsi.methods import METHODS, Method
from bsi.methods.base import Parametrization
from bsi.model import Model
from bsi.progress import log
from bsi.recipe import Recipe, check_name, from_plain, to_plain
from bsi.runtime import autoencoders, checkpoint
from bsi.runtime.autoencoders import StoredAutoencoder
from bsi.runtime.checkpoint import Stored
from bsi.runtime.ema import reconstruct
from bsi.runtime.run_folder import RunFolder, check_inside
from bsi.sampler import Sampler
from bsi.values import Bins, DataKind, Latents, check_classes

EXPORT_FORMAT = 1
MODEL_FILE = "model.safetensors"  # the file name in a folder for the Hugging Face hub
METADATA = "bsi"
CODER = "autoencoder/"  # before the names of the autoencoder's weights
BUNDLED = {"digits": Path(__file__).parents[1] / "pretrained" / "digits.safetensors"}  # `bsi.load("digits")`
PACKAGE = "bsi_networks"  # the package of the extra `networks`: a folder for each network
INSTALLABLE = ("cifar10", "cifar10-classes")  # what it holds
LARGEST_SAMPLE = 2**31  # largest number of values in one sample
SHOWN = 7  # differences in a message of at most ten lines
MOST_SUGGESTED = 3
REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)

CARD = """---
library_name: bsi
tags: [generative, {kind}]
---

# {name}

{kind_name} for {origin}.

```python
import bsi

model = bsi.Model.from_pretrained("PATH"{backbone})  # this folder, or the name of this repository
samples = model.sample(16)
```

`config.json` describes the model. The weights are {weights}.
"""


# ---- Description -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataSpec:
    """The properties of the data that a model and a resumed run depend on; `version` is a hash of the content."""

    name: str
    version: str
    count: int
    shape: tuple[int, ...]
    kind: DataKind
    classes: int = 0  # labels are 0 .. classes - 1; 0 without labels
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_classes(self.class_names)  # they may come from a file

    @property
    def bins(self) -> Bins | None:
        return self.kind if isinstance(self.kind, Bins) else None

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of a sample's values, which networks are built for."""
        return self.kind.latent_shape(self.shape)

    @property
    def sizes(self) -> tuple[tuple[int, ...], int | None, int]:
        """What networks are built for: the shape of a sample's values, the number of bins, that of classes."""
        return self.latent_shape, None if self.bins is None else self.bins.count, self.classes

    def build(self, config: BackboneConfig) -> Backbone:
        """A network for this data."""
        if isinstance(config, AutoencoderConfig) and self.bins is None:
            got = f"got {self.name} of {type(self.kind).__name__.lower()}. Name another with --data.name."
            raise UsageError(f"an autoencoder is trained on images, {got}")
        return build(config, *self.sizes)


@dataclass(frozen=True)
class ModelSpec:
    """What `build_model` needs of a `Recipe`: the description of a model that was not trained by one."""

    name: str
    method: Method
    backbone: BackboneConfig | None
    parametrization: Parametrization | None = None
    sigma_data: float = 1.0
    consistent: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True)
class Trained:
    """Weights by name, with the description of the model and of the data."""

    recipe: Recipe | ModelSpec
    data: DataSpec
    network: str
    step: int
    weights: Mapping[str, Tensor]
    ema: bool = True
    sigma_rel: float | None = None
    autoencoder: StoredAutoencoder | None = None

    @property
    def dataset(self) -> str:
        """The name of the dataset, or the path of its folder; for a model of latents, of the images."""
        if isinstance(self.data.kind, Latents):
            return self.data.kind.images
        return self.recipe.data.name if isinstance(self.recipe, Recipe) else self.data.name

    @property
    def version(self) -> str:
        """The content of `dataset`."""
        return self.data.kind.version if isinstance(self.data.kind, Latents) else self.data.version

    @property
    def unfinished(self) -> str:
        """The step reached of how many, if training has not ended."""
        steps = self.recipe.steps if isinstance(self.recipe, Recipe) else 0
        return f"step {self.step} of {steps}" if self.step < steps else ""

    @staticmethod
    def read(given: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Trained:
        """The weights with their description from a file; raises KeyError or TypeError if it is incomplete."""
        name, kind = ("model", ModelSpec) if "model" in given else ("recipe", Recipe)
        recipe = cast(Recipe | ModelSpec, from_plain(kind, given[name], name))
        data, network, step = from_plain(DataSpec, given["data"], "data"), str(given["network"]), int(given["step"])
        return Trained(recipe, data, network, step, weights, bool(given.get("ema", True)), given.get("sigma_rel"))

    @staticmethod
    def of(model: Model, name: str) -> Trained:
        """The description of a model. One that was loaded, and not changed since, keeps its recipe, step and data."""
        network = getattr(model.denoiser.backbone, "_orig_mod", model.denoiser.backbone)  # of a compiled network
        if type(model.method) not in METHODS.values():
            fix = f"Register it first: bsi.methods.register(name, {type(model.method).__name__})."
            raise UsageError(f"the method {model.method!r} could not be loaded again by its name. {fix}")
        data = DataSpec("", "", 0, model.stored_shape, model.kind, model.classes or 0, model.class_names)
        if not isinstance(model.autoencoder, StoredAutoencoder | None):
            raise UsageError(f"an autoencoder of your own cannot be stored, got {type(model.autoencoder).__name__}.")
        config, denoiser, known = config_of(network, data), model.denoiser, model.origin
        weights = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in network.state_dict().items()}
        own = class_name(network) if config is None else ""
        if not (isinstance(known, Trained) and known.recipe.method == model.method and known.recipe.backbone == config):
            numbers = denoiser.parametrization, denoiser.sigma_data, denoiser.consistent
            known = Trained(ModelSpec(name, model.method, config, *numbers), data, own, 0, weights)
        return replace(known, network=own, weights=weights, ema=False, sigma_rel=None, autoencoder=model.autoencoder)

    def about(self) -> dict[str, Any]:
        """The JSON in the metadata of an export, which `read` reads."""
        return {
            "format": EXPORT_FORMAT, "bsi": __version__,
            "recipe" if isinstance(self.recipe, Recipe) else "model": to_plain(self.recipe),
            "data": to_plain(self.data), "network": self.network,
            "step": self.step, "ema": self.ema, "sigma_rel": self.sigma_rel,
        }  # fmt: skip


def class_name(network: nn.Module) -> str:
    """The full name of a network's class."""
    return f"{type(network).__module__}.{type(network).__qualname__}"


# ---- Building --------------------------------------------------------------------------------------------------------


def build_model(
    recipe: Recipe | ModelSpec, data: DataSpec, backbone: nn.Module | None = None,
    autoencoder: StoredAutoencoder | None = None, meta: bool = False,
) -> Model:  # fmt: skip
    """Build the model of a recipe for the described data; `backbone` is the caller's own network.

    With `meta` a network of the recipe has no memory: its parameters are on the meta device.
    """
    if backbone is None:
        if recipe.backbone is None:
            raise UsageError("this recipe has no network of its own. Pass backbone=...")
        with torch.device("meta") if meta else nullcontext():
            backbone = data.build(recipe.backbone)
    elif isinstance(backbone, Backbone) and backbone.shape != data.latent_shape:
        shapes = f"got {backbone.shape} and {data.latent_shape}"
        raise UsageError(f"the network and the data must have one shape, {shapes}. Build the network for this data.")
    consistent = recipe.objective.consistency if isinstance(recipe, Recipe) else recipe.consistent
    model = Model(
        backbone, recipe.method, data.shape, data=data.kind, parametrization=recipe.parametrization,
        sigma_data=recipe.sigma_data, class_names=data.class_names, consistent=consistent,
        autoencoder=autoencoder,
    )  # fmt: skip
    model.sampler = _sampler(recipe)
    return model


def _sampler(recipe: Recipe | ModelSpec) -> Sampler:
    return recipe.samples.sampler if isinstance(recipe, Recipe) else Sampler()


def config_of(backbone: nn.Module, data: DataSpec) -> BackboneConfig | None:
    """The config from which `build_model` would build this network for this data; None for any other network."""
    if type(backbone) not in (DiT, UNet, MLP, Autoencoder):  # a subclass may compute anything
        return None
    ours = cast(DiT | UNet | MLP | Autoencoder, backbone)
    with torch.device("meta"):
        again = data.build(ours.config)
    same = repr(ours) == repr(again) and not differences(ours.state_dict(), again.state_dict())
    same = same and (ours.shape, ours.fourier.exponents) == (again.shape, again.fourier.exponents)
    return ours.config if same else None


def differences(there: Mapping[str, Stored], here: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor that is missing on one side or differs in shape, at most eight lines."""

    def shape(tensor: Stored | None) -> str:
        return "missing" if tensor is None else str(tuple(tensor.shape))

    both = [(name, shape(there.get(name)), shape(here.get(name))) for name in {**here, **there}]
    lines = [f"  {name}: {theirs} there, {ours} here" for name, theirs, ours in both if theirs != ours]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"  and {len(lines) - SHOWN} more"]


def set_weights(model: Model, trained: Trained, where: str) -> None:
    """Copy weights into a model, whose network must have the same tensors."""
    _check_same(trained, model.denoiser.backbone, where)
    model.denoiser.backbone.load_state_dict(dict(trained.weights))


def _check_same(trained: Trained, network: nn.Module, where: str) -> None:
    if found := differences(trained.weights, network.state_dict()):
        theirs = trained.network or str(trained.recipe.backbone)
        raise UsageError("\n".join([f"the weights of {where} are those of another network, {theirs}:", *found]))


# ---- Loading ---------------------------------------------------------------------------------------------------------


def load(
    path: str | PathLike[str], ema: bool = True, backbone: nn.Module | None = None, step: int | None = None
) -> Model:
    """Load a model onto the CPU, in evaluation mode.

    Args:
        path: A run, its folder, an exported file, or the name of an installed network (`digits`).
        ema: Load the moving average; otherwise the weights themselves.
        backbone: Your own network, if the run was trained with one.
        step: The step of the checkpoint. By default the latest.
    """
    return model_of(read_trained(Path(path), ema, step), fspath(path), backbone)


def model_of(trained: Trained, where: str, backbone: nn.Module | None = None) -> Model:
    """Build the model of trained weights, in evaluation mode; error messages name `where` they were read from."""
    config, data = trained.recipe.backbone, trained.data
    if config is None and backbone is None:
        own = f"{where} was trained with your own network, {trained.network}, and has only its weights."
        raise UsageError(f"{own} Pass one like it again, backbone={trained.network.rpartition('.')[2]}(...).")
    if config is not None and backbone is not None:
        raise UsageError(f"{where} describes its network itself. Leave backbone out.")
    if config is not None:  # compare the shapes before memory is allocated
        deep = max(getattr(config, "depth", 0), getattr(config, "levels", 0))
        if deep > len(trained.weights) or math.prod(data.shape) > LARGEST_SAMPLE:
            raise CorruptCheckpoint(f"{where} is damaged: its weights are not those of {config} for {data.shape}.")
        with torch.device("meta"):
            _check_same(trained, data.build(config), where)
    if isinstance(data.kind, Latents) and trained.autoencoder is not None:
        autoencoders.checked(data.kind, trained.autoencoder, where)
    model = build_model(trained.recipe, data, backbone, trained.autoencoder)
    set_weights(model, trained, where)
    model.origin = replace(trained, weights={})
    return model.eval()


def sampler_of(path: Path) -> Sampler:
    """The sampler of the recipe of a run or an export; the default one of a model that no recipe trained."""
    record = RunFolder(path).read_record()
    return _sampler(read_trained(path).recipe if record is None else record.recipe)


def installed() -> dict[str, Path]:
    """The installed networks by name: of this package, and of `bsi_networks`, which is not imported."""
    package = importlib.util.find_spec(PACKAGE)
    places = (package.submodule_search_locations or []) if package is not None else []
    return BUNDLED | {file.parent.name: file.parent for at in places for file in Path(at).glob(f"*/{MODEL_FILE}")}


def find_bundled(path: Path) -> Path:
    """The file or folder of an installed network by its name, or the path as it is, which comes first if it exists."""
    path = path.expanduser()
    return path if path.exists() else installed().get(str(path), path)


def read_trained(path: Path, ema: bool = True, step: int | None = None) -> Trained:
    """Weights and their description, from a run folder, an exported file or the name of a bundled network."""
    path = find_bundled(path)
    for file in (path, path / MODEL_FILE):
        if file.is_file():
            return _read_export(file, step)
    root = RunFolder(path).checkpoints
    while (found := checkpoint.find(root, log, step) if root.is_dir() else None) is not None:
        try:
            weights = checkpoint.read_tensors(found, "ema" if ema else "model")
            trained = Trained.read({**found.state, "ema": ema}, weights)
            return replace(trained, autoencoder=autoencoders.attached(trained.data.kind, path))
        except (OSError, CorruptCheckpoint):
            if found.folder.exists():
                raise
            # A running training has deleted this checkpoint, and has a newer one.
    if str(path) in INSTALLABLE and not path.exists():
        raise UsageError(f"the network {path} is not installed. Run: pip install --upgrade 'bsi[networks]'")
    names = installed()
    near = {found.name: str(found) for found in _trained_in(path.parent)}
    near |= {name: name for name in (*names, *INSTALLABLE) if path.name == str(path)}
    close = [near[name] for name in difflib.get_close_matches(path.name, near, n=1)]
    meant = " or ".join(map(str, _trained_in(path)[:MOST_SUGGESTED] or close))
    hint = f"Did you mean {meant}?" if meant else f"`bsi train` makes one; installed is {', '.join(names)}."
    if str(path) in names:
        hint = "It hides the bundled network of that name: rename it, or run in another folder."
    raise UsageError(f"{path} is neither a run folder with a checkpoint nor an exported file. {hint}")


def _trained_in(folder: Path) -> list[Path]:
    """Run folders and exports in a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.suffix == ".safetensors" or RunFolder(p).checkpoints.is_dir()]
    return sorted(found, key=lambda p: p.stat().st_mtime, reverse=True)


def _read_export(path: Path, step: int | None) -> Trained:
    if step is not None:
        raise UsageError(f"{path} is an exported file, which holds a single step. Leave step out.")
    given: dict[str, Any] = {}
    metadata, weights = read_tensors(path)
    try:
        given = json.loads(metadata[METADATA])
        if given["format"] != EXPORT_FORMAT:
            raise UsageError(f"{path} has export format {given['format']!r}, and this version reads {EXPORT_FORMAT}.")
        coder = {name: weights.pop(name) for name in [*weights] if name.startswith(CODER)}
        trained = Trained.read(given, weights)
        if not isinstance(trained.data.kind, Latents):
            return trained
        about = json.loads(metadata[autoencoders.METADATA])
        coder = {name.removeprefix(CODER): tensor for name, tensor in coder.items()}
        return replace(trained, autoencoder=StoredAutoencoder.of(about, coder, str(path)))
    except BsiError as error:
        if (written := given.get("bsi", __version__)) == __version__:
            raise
        fix = f"It was written by bsi {written!s:.20}, and this is {__version__}: pip install --upgrade bsi"
        raise UsageError(f"{error} {fix}") from error
    except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path} does not describe its model: it was not written by `bsi export`.") from error


# ---- Writing ---------------------------------------------------------------------------------------------------------


def export(
    run: str | Path, out: str | Path | None = None, ema: bool = True, step: int | None = None,
    sigma_rel: float | None = None,
) -> Path:  # fmt: skip
    """Write a model as one file.

    Args:
        run: A run folder, an exported file, or the name of a bundled network.
        out: The file to write. By default NAME-STEP.safetensors in the run folder, or in the current folder.
        ema: Export the moving average; otherwise the weights themselves.
        step: The step of the checkpoint. By default the latest.
        sigma_rel: Export the power-function average of this relative width instead.
    """
    trained = read_trained(Path(run), ema, None if sigma_rel is not None else step)
    kind = "" if trained.ema else "-weights"
    if sigma_rel is not None:
        end, weights = reconstruct(Path(run), sigma_rel, step)
        trained = replace(trained, step=end, weights={**trained.weights, **weights}, sigma_rel=sigma_rel)
        kind = f"-{sigma_rel:g}"
    folder = Path(run) if Path(run).is_dir() else Path()
    target = Path(out or folder / f"{trained.recipe.name}-{trained.step}{kind}.safetensors")
    if out is None and Path(run).is_dir():
        check_inside(folder, target)
    check_writable(target, "--out")
    return write_export(target, trained)


def write_export(path: Path, trained: Trained) -> Path:
    """Write the file, atomically."""
    weights, metadata = dict(trained.weights), {METADATA: json.dumps(trained.about())}
    if trained.autoencoder is not None:
        weights |= {f"{CODER}{name}": tensor for name, tensor in trained.autoencoder.tensors().items()}
        metadata[autoencoders.METADATA] = json.dumps(trained.autoencoder.about)
    with atomic(path, "--out") as temporary:
        write_tensors(temporary, weights, metadata)
    return path


def write_model_folder(trained: Trained, folder: Path) -> Path:
    """Write a model as a folder with the content of a hub repository."""
    name, kind, shape = trained.recipe.name, to_plain(trained.recipe.method)["kind"], trained.data.shape
    origin = f"data of shape {' x '.join(map(str, shape))}"
    if isinstance(trained.recipe, Recipe):
        origin += f", trained on {trained.data.name or 'your data'} with `bsi train {name}`, step {trained.step}"
    own = "" if trained.recipe.backbone else f", backbone={trained.network.rpartition('.')[2]}(...)"
    weights = "an exponential moving average" if trained.ema else "those of the model when it was saved"
    make_folder(folder, "the folder")
    write_export(folder / MODEL_FILE, trained)
    write_json(folder / "config.json", trained.about())
    card = CARD.format(name=name, kind=kind, kind_name=kind.upper(), origin=origin, backbone=own, weights=weights)
    write_text(folder / "README.md", card)
    return folder


# ---- The Hugging Face hub --------------------------------------------------------------------------------------------


def is_repository(source: str | Path) -> bool:
    """Whether this is the name of a repository, USER/NAME, rather than a path in a folder that exists here."""
    return REPOSITORY.fullmatch(str(source)) is not None and not Path(source).parent.exists()


def upload(folder: str | Path, repository: str, private: bool = True) -> str:
    """Upload a folder with the token of `hf auth login`; returns its address."""
    with _hub(f"upload to {repository}") as hub:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))


def download(repository: str, revision: str | None = None) -> Path:
    """Download a hub repository, or find it in the cache; returns the folder, for `bsi.load`."""
    wanted = [MODEL_FILE, "config.json", "README.md"]  # no code
    with _hub(f"download {repository}") as hub:
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=wanted))


@contextmanager
def _hub(purpose: str) -> Iterator[Any]:
    """huggingface_hub; what it raises (no connection, no such repository, no token) becomes one message."""
    with extra("hub", "the Hugging Face hub"):
        import huggingface_hub  # type: ignore[import-not-found, unused-ignore]
    try:
        yield huggingface_hub
    except (OSError, ValueError) as error:  # its errors of HTTP and of missing files are of these kinds
        reason = " ".join(str(error).split()).partition(". ")[0]
        fix = "Check the name, the connection and `hf auth whoami`; a folder on this machine is loaded by its path."
        raise UsageError(f"cannot {purpose} with the Hugging Face hub: {reason}. {fix}") from error
