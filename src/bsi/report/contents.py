"""What a report contains: the files of a run, and measurements of its model.

Files are read only if they are regular files inside the run folder, and a damaged file is left out: only `run.json`
must be readable. Measurements are limited by a number of operations, so that a report takes seconds; what would take
longer is listed in `Measured.missing`.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bsi.backbones.costs import cost
from bsi.data.baselines import baselines
from bsi.data.store import find_dataset
from bsi.elbo import measurement_loss
from bsi.errors import BsiError, DataError, UsageError
from bsi.evaluation.samples import animate_beliefs
from bsi.io import digest_file, open_untrusted, read_json
from bsi.model import Model
from bsi.pictures import is_image
from bsi.recipe import Recipe, flat
from bsi.report.charts import Point
from bsi.rng import standard_normal, subset
from bsi.runtime.export import Trained, load
from bsi.runtime.run_folder import RunFolder, Value, read_journal
from bsi.sampler import Sampler
from bsi.sampling import evaluations
from bsi.symbols import alphabet, beliefs, most_probable
from bsi.values import Bins

MAX_PICTURES, PICTURE_BYTES = 6, 32 << 20
TEXT_BYTES, TEXT_STEPS, LONGEST = 1200, 7, 256  # of samples; steps and symbols of a text that is shown
PNG = b"\x89PNG\r\n\x1a\n"

OPERATIONS = {"cpu": 3e11, "cuda": 5e15}  # a few seconds each
ANIMATED, STEPS = 9, 32  # samples of the animation, and their steps
LEVELS, LEVEL_IMAGES = 21, 96
MEASURE, RECON = 5, 2  # evaluations of each sample, as in the paper
MAX_IMAGES, MIN_IMAGES = 512, 16
TOO_SLOW = "it takes too long on this device. Use --device cuda, or `bsi eval` and `bsi sample`."


class RunContents:
    """The files of a run.

    Attributes:
        pictures: Samples drawn during training by step, as a grid (PNG) or as text.
        evaluations: Results of `bsi eval`, oldest first.
        hashes: Name, size and SHA-256 of files of the run and of its latest checkpoint.
    """

    def __init__(self, path: Path) -> None:
        record = RunFolder(path).read_record() if path.is_dir() else None
        if record is None:
            raise UsageError(f"{path} is not a run folder: it has no run.json. Use a folder that `bsi train` wrote.")
        self.path, self.recipe, self.network = path, record.recipe, record.network
        about, status = self._object("run.json"), self._object("status.json")
        changed, command = (about[key] if isinstance(about.get(key), list) else [] for key in ("changed", "command"))
        self.changed, self.command = [str(change) for change in changed], " ".join(str(word) for word in command)
        environment = flat(about.get("environment", {}))
        self.environment = {name: "none" if v is None else str(v) for name, v in environment.items()}
        self.data_version = str(about.get("data_version", ""))
        self.state, self.step = str(status.get("state", "unknown")), int(number(status.get("step")) or 0)
        self.journal = read_journal(path) if self._file("journal.jsonl") else []
        stored = [self._object(f"evaluations/{file.name}") for file in sorted(path.glob("evaluations/*.json"))]
        self.evaluations = [record for record in stored if record]
        self.pictures = self._pictures()
        self.hashes = self._hashes()

    @property
    def bounds(self) -> list[dict[str, Any]]:
        """Results of `bsi eval --bpd` on the test set, oldest first."""
        return [r for r in self.evaluations if isinstance(r.get("bits_per_dim"), float) and r.get("split") == "test"]

    def events(self, kind: str) -> list[dict[str, Value]]:
        return [record for record in self.journal if record.get("event") == kind]

    def numbers(self, kind: str, name: str) -> list[tuple[float, float]]:
        """(step, value) of one quantity of the journal, without missing and non-finite values."""
        found = [(number(record.get("step")), number(record.get(name))) for record in self.events(kind)]
        return [(step, value) for step, value in found if step is not None and value is not None]

    def _file(self, name: str) -> Path | None:
        """The path of a file of the run; None unless it is a regular file inside the run folder, also behind links."""
        path = self.path / name
        try:
            return path if path.is_file() and path.resolve().is_relative_to(self.path.resolve()) else None
        except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte
            return None

    def _object(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of the run; an empty one if there is none."""
        path = self._file(name)
        try:
            value = None if path is None else read_json(path)
        except DataError:
            return {}
        return value if isinstance(value, dict) else {}

    def _pictures(self) -> dict[int, bytes | str]:
        """The last of the files that the journal names, and a few before it at equal distances."""
        named, found = {}, dict[int, bytes | str]()
        for record in self.events("sample"):
            step, path = number(record["step"]), self._file(f"samples/{Path(str(record.get('file', ''))).name}")
            if step is not None and path is not None:
                named[int(step)] = path
        steps = sorted(named)
        places = np.linspace(0, len(steps) - 1, min(MAX_PICTURES, len(steps))).round().astype(int)
        for step in (steps[place] for place in places):
            is_text = named[step].suffix == ".txt"
            try:
                with open_untrusted(named[step], PICTURE_BYTES) as file:
                    data = file.read(TEXT_BYTES if is_text else -1)
            except DataError:
                continue
            if is_text:
                found[step] = data.decode("utf-8", "replace")
            elif data.startswith(PNG):
                found[step] = data
        return found

    def _hashes(self) -> list[tuple[str, int, str]]:
        files = [path for name in ("run.json", "journal.jsonl") if (path := self._file(name))]
        hashes = [(path.name, path.stat().st_size, digest_file(path)) for path in files]
        pointer = self._file("checkpoints/latest")
        if pointer is None:
            return hashes
        with open_untrusted(pointer) as file:
            latest = Path(file.read(255).decode("utf-8", "replace").strip()).name
        parts = self._object(f"checkpoints/{latest}/manifest.json").get("files")
        for name, entry in sorted(parts.items()) if isinstance(parts, dict) else ():
            size = number(entry.get("bytes")) if isinstance(entry, dict) else None
            if size is not None:
                hashes.append((f"{latest}/{name}", int(size), str(entry.get("sha256"))))
        return hashes


def number(value: object) -> float | None:
    """A finite float; None for anything else that a file may contain, such as text or an integer above 1e300."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return float(value)
    return None


@dataclass(frozen=True)
class TextStep:
    """The prediction of a text at one step of drawing it: the most probable symbols, and their probabilities."""

    level: float
    letters: Sequence[str]
    probabilities: Sequence[float]


@dataclass
class Measurements:
    """Measurements of the model; `missing` gives the reason for each that is None or empty."""

    parameters: int | None = None
    animation: bytes | None = None
    texts: Sequence[TextStep] = ()
    bound: Mapping[str, Any] | None = None  # as `bsi eval` stores it
    by_level: Sequence[Point] = ()
    missing: list[str] = field(default_factory=list)
    baselines: Mapping[str, float] = field(default_factory=dict)  # of the same test samples, in bits per dimension


def measure(
    run: RunContents, device: torch.device, backbone: nn.Module | None, bound_known: bool = False
) -> Measurements:
    """Measure the EMA of the run's latest checkpoint; without the bound if that is known already."""
    try:
        model = load(run.path, backbone=backbone).to(device)
    except BsiError as error:
        return Measurements(missing=[f"the model was not loaded: {error}"])
    measured = Measurements(sum(p.numel() for p in model.parameters()))
    try:
        model.denoiser.given(None)
    except UsageError as error:  # an autoencoder
        measured.missing.append(str(error))
        return measured
    budget = _affordable_evaluations(run.recipe, model)
    if model.symbols is not None and len(model.shape) == 1:
        measured.texts = draw_text(model)
    elif not is_image(model.shape):
        measured.missing.append(f"no animation: data of shape {model.shape} is not an image")
    elif budget < ANIMATED * evaluations(model.method, STEPS):
        measured.missing.append(f"no animation: {TOO_SLOW}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "belief.webp"
            animate_beliefs(model, Sampler(steps=STEPS), 0, None, ANIMATED, path)
            measured.animation = path.read_bytes()
    trained = model.origin
    assert isinstance(trained, Trained)  # a loaded model
    name = trained.dataset
    dataset = find_dataset(name, trained.version)
    if dataset is None:
        measured.missing.append(f"no bound: the test set of {name} is not on this machine. Try `bsi data --list`.")
        return measured
    wanted = min(MAX_IMAGES, len(dataset.test))
    budget -= LEVELS * min(wanted, LEVEL_IMAGES)
    num = min(wanted, int(budget) // (MEASURE + RECON))
    if num < min(MIN_IMAGES, wanted):
        measured.missing.append(f"no bound: {TOO_SLOW}")
        return measured
    images = dataset.test[subset(len(dataset.test), num)]
    data, measured.baselines = torch.from_numpy(images), baselines(dataset.train, images, dataset.kind)
    if not bound_known:
        found = model.bits_per_dim(data, measure=MEASURE, recon=RECON).record()
        measured.bound = None if found["bits_per_dim"] is None else {**found, "images": num}
    measured.by_level = bits_by_level(model, data[subset(num, LEVEL_IMAGES)])
    return measured


def draw_text(model: Model) -> list[TextStep]:
    """One sample at a few steps of drawing it, at equal distances."""
    assert model.symbols is not None
    letters, found = alphabet(model.symbols), []
    for i, step in enumerate(model.trajectory(1, steps=STEPS)):
        if i * (TEXT_STEPS - 1) % STEPS < TEXT_STEPS - 1:
            encoder = model.method.encoder(step.level[None])
            _, predicted = beliefs(model.symbols, encoder, step.latent, step.x_hat)
            index, p = most_probable(predicted)[0, :, :LONGEST].tolist()
            found.append(TextStep(float(step.level), [letters[int(k)] for k in index], p))
    return found


def _affordable_evaluations(recipe: Recipe, model: Model) -> float:
    """The number of evaluations of one sample that take a few seconds."""
    operations = OPERATIONS[model.device.type]
    if recipe.backbone is None:  # the user's own network: about two operations per parameter and position
        return operations / (2 * sum(p.numel() for p in model.parameters()) * math.prod(model.shape[1:]))
    bins = model.kind.count if isinstance(model.kind, Bins) else None
    return operations / cost(recipe.backbone, model.latent_shape, bins).flops


@torch.no_grad()
def bits_by_level(model: Model, data: Tensor) -> list[Point]:
    """The integrand of the measurement term in bits per dimension and decade of the level; its area is L_M."""
    x = model.values(data).to(model.device)
    decades = math.log10(model.method.levels.high / model.method.levels.low)
    points = []
    for i in range(LEVELS):
        t = torch.full((len(x),), (i + 0.5) / LEVELS, dtype=torch.float64, device=x.device)
        eps = standard_normal(0, torch.arange(len(x), device=x.device), i, model.latent_shape)
        nats = measurement_loss(model.method, model.denoiser, x, t, eps).double()
        bits = nats / (math.prod(model.shape) * math.log(2) * decades)
        error = float(bits.std()) / math.sqrt(len(bits)) if len(bits) > 1 else 0.0
        points.append(Point(float(model.method.levels.icdf(t[:1])), float(bits.mean()), error))
    return points
