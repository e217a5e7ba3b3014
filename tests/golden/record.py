"""Results that a refactor must not change: hashes and values, on one thread of a CPU, in float32.

    python tests/golden/record.py                      compare with values.json, a line for each item
    python tests/golden/record.py samples bounds       some groups alone
    python tests/golden/record.py --write              record anew, after a change that is meant

run-0.1.0/ and export-0.1.0.safetensors were written by version 0.1.0 (`--write-legacy`) and are never written again:
later versions load them and resume the run.

All private names of bsi that are used are in the block of adapters below.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bsi

HERE = Path(__file__).parent
VALUES, LEGACY_RUN, LEGACY_EXPORT = HERE / "values.json", HERE / "run-0.1.0", HERE / "export-0.1.0.safetensors"
CLOSE = 1e-5  # allowed on another machine or with another torch, relative and absolute


# --- adapters: names of bsi that a refactor may move; adjust them only here -------------------------------------------

from bsi.backbones import DiTConfig, MLPConfig, UNetConfig, build, cost, resolve  # noqa: E402
from bsi.backbones.config import KNOWN_NAMES  # noqa: E402
from bsi.brownian import BrownianPath  # noqa: E402
from bsi.cli import main as command_line  # noqa: E402
from bsi.data import open_dataset  # noqa: E402
from bsi.data.batches import as_source  # noqa: E402
from bsi.elbo import finite_measurement_loss  # noqa: E402
from bsi.flow import binned_flow, exact_divergence, flow_density, hutchinson  # noqa: E402
from bsi.grids import GRIDS, named_grid  # noqa: E402
from bsi.metrics import Inception, Moments, frechet_distance, frechet_error, kernel_distance  # noqa: E402
from bsi.metrics import precision_recall as precision_recall_of  # noqa: E402
from bsi.metrics.inception import expected_shapes as inception_shapes  # noqa: E402
from bsi.recipe import Data, Ema, Evaluation, Every, Keep, Objective, Optimizer, Recipe, Samples  # noqa: E402
from bsi.rng import (  # noqa: E402
    SeededNoise,
    coins,
    derive,
    normals,
    philox,
    sample_ids,
    seed_words,
    standard_normal,
    uniforms,
    weighted_normals,
)
from bsi.runtime.distributed import Place, World  # noqa: E402
from bsi.runtime.export import export as write_export  # noqa: E402
from bsi.runtime.run_folder import read_journal  # noqa: E402
from bsi.sampler import Sampler  # noqa: E402
from bsi.sampling import levels_of  # noqa: E402
from bsi.solvers import SOLVERS  # noqa: E402
from bsi.studies.measure import DigitsFeatures  # noqa: E402
from bsi.training.step import Stream, pieces, shards_of  # noqa: E402


def standardized(mean: float, std: float) -> dict[str, Any]:
    """The argument of `bsi.Model` for continuous data."""
    return {"data": bsi.Standardize(mean, std)}


def with_optimizer(recipe: Recipe, **settings: Any) -> Recipe:
    """A recipe whose optimizer has other settings."""
    return replace(recipe, optimizer=replace(recipe.optimizer, **settings))


def adamw(recipe: Recipe, **settings: Any) -> Recipe:
    return replace(recipe, optimizer=Optimizer(kind="adamw", **settings))


def predictor(model: bsi.Model) -> Callable:
    """(latent, level) -> x_hat."""
    return model.denoiser


def network_of(model: bsi.Model) -> torch.nn.Module:
    return model.denoiser.backbone


def stream_of(recipe: Recipe, start: int, labels: bool) -> Stream:
    """The batches of a run on the digits from a step on, on one rank."""
    digits = open_dataset("digits")
    world = World(Place(), torch.device("cpu"))
    known = digits.labels.train.astype(np.int64) if labels else None
    return Stream(recipe, as_source(digits.train), (1, 8, 8), world, start, known, 10 if labels else 0)


# --- what is recorded -------------------------------------------------------------------------------------------------

# integers; floats; values that rounding can change a lot, such as an index
EXACT, FLOATS, ROUNDED = "exact", "floats", "rounded"


@dataclass(frozen=True)
class Item:
    name: str
    array: np.ndarray
    kind: str

    @property
    def sha256(self) -> str:
        """Over type, shape and little-endian content."""
        array = np.ascontiguousarray(self.array)
        array = array.astype(array.dtype.newbyteorder("<"))
        head = f"{self.array.dtype.name} {self.array.shape}\n".encode()
        return hashlib.sha256(head + array.tobytes()).hexdigest()

    @property
    def values(self) -> list[float]:
        """All values if they are few, else some from all over."""
        flat = self.array.reshape(-1)
        if len(flat) > 64:
            flat = flat[np.linspace(0, len(flat) - 1, 24).round().astype(int)]
        return flat.tolist()

    def record(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "kind": self.kind, "shape": list(self.array.shape), "values": self.values}


def item(name: str, value: Any, rounded: bool = False) -> Item:
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    kind = ROUNDED if rounded else FLOATS if array.dtype.kind == "f" else EXACT
    return Item(name, array, kind)


def hash_of(name: str, tensors: dict[str, torch.Tensor], rounded: bool = False) -> Iterator[Item]:
    """All tensors by their names as one array of bytes, and the mean size of each for where bits may differ."""
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + tensor.contiguous().numpy().tobytes())
    yield item(f"{name} (hash)", np.frombuffer(digest.digest(), np.uint8), rounded)
    means = [float(tensor.double().abs().mean()) for _, tensor in sorted(tensors.items())]
    yield item(f"{name} (mean sizes)", np.array(means))


Group = Callable[[Path], Iterator[Item]]

METHODS = {"bsi": bsi.BSI(alpha_M=1e4), "bfn": bsi.BFN(sigma_1=1e-2), "vdm": bsi.VDM(nu_max=1e4)}
DIGITS_BINS = bsi.Bins(-1.0, 1.0, 17)
DIT = DiTConfig(width=32, depth=2, heads=2, patch=2, dropout=0.0)
UNET = UNetConfig(width=8, levels=1, heads=1, dropout=0.1, coarser=(16,))
MLP = MLPConfig(width=32, depth=2)


def network(config: Any, shape: tuple[int, ...] = (1, 8, 8), bins: int | None = 17, seed: int = 0) -> torch.nn.Module:
    """A network with seeded weights. Layers that start at 0 get weights too, so that every layer affects the output."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        made = build(config, shape=shape, bins_count=bins)
        for parameter in made.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.05)
    return made.eval()


def digits_model(method: str, bins: bsi.Bins | None = DIGITS_BINS) -> bsi.Model:
    """The bundled network for BSI, seeded ones for the others; without bins, samples are values."""
    if method == "bsi":
        bundled = bsi.load("digits")
        return bsi.Model(network_of(bundled), bundled.method, (1, 8, 8), data=bins).eval()
    return bsi.Model(network(DIT), METHODS[method], (1, 8, 8), data=bins).eval()


def test_digits(count: int) -> torch.Tensor:
    return torch.tensor(open_dataset("digits").test[:count])


test_digits.__test__ = False  # a name that pytest would collect


def tiny(method: str, config: Any = DIT, **settings: Any) -> Recipe:
    recipe = replace(
        bsi.recipes.digits(method),
        backbone=config,
        steps=50,
        batch=16,
        virtual_shards=4,
        ema=Ema(beta=0.9, start=10),
        every=Every(journal=1, evaluate=50, sample=0, checkpoint=50),
        evaluation=Evaluation(images=16, measure=2, recon=2),
        samples=Samples(4, Sampler(4)),
        keep=Keep(last=1, background=False),
        precision="float32",
        compile=False,
        threads=1,
    )
    return replace(with_optimizer(recipe, warmup=10), **settings)


def recipes() -> dict[str, Recipe]:
    """The runs of the training group: every method, network and optimizer, and most settings of a recipe."""
    sigmoid = Objective(weight="sigmoid")
    seen = Data("digits", flips=True, labels=True, unlabeled=0.25)
    return {
        "bsi-dit": tiny("bsi"),
        "bfn-dit": tiny("bfn"),
        "vdm-dit": tiny("vdm"),
        "bsi-unet": adamw(tiny("bsi", UNET), lr=3e-3, warmup=5),
        "bsi-mlp": adamw(tiny("bsi", MLP), lr=3e-3),
        "bsi-dit-audit": tiny("bsi", audit=True, steps=10),
        "bsi-dit-labels": tiny("bsi", data=seen, objective=sigmoid, accumulation=2, seed=7, steps=20),
        "bsi-mlp-finite": adamw(tiny("bsi", MLP, objective=Objective(finite_k=8), steps=20), lr=1e-3),
    }


def train(recipe: Recipe, out: Path) -> Path:
    with contextlib.redirect_stderr(io.StringIO()):
        return bsi.train(recipe, out=out, device="cpu").path


def journal_items(name: str, run: Path, after: int = 0) -> Iterator[Item]:
    records = [record for record in read_journal(run) if record["step"] > after]
    lines = [record for record in records if record["event"] == "train"]
    for column in ("loss", "bits_per_dim", "bits_per_dim_finite_k", "lr", "grad_norm"):
        if column in lines[0]:
            yield item(f"{name} {column}", np.array([line[column] for line in lines], np.float64))
    found = [record["bits_per_dim"] for record in records if record["event"] == "evaluate"]
    yield item(f"{name} evaluated bits_per_dim", np.array(found, np.float64))


def training(tmp: Path) -> Iterator[Item]:
    """(1) Losses of the first steps through the trainer, and the weights that they lead to."""
    for name, recipe in recipes().items():
        run = train(recipe, tmp / name)
        yield from journal_items(name, run)
        yield from hash_of(f"{name} ema", network_of(bsi.load(run)).state_dict(), rounded=True)
        yield from hash_of(f"{name} weights", network_of(bsi.load(run, ema=False)).state_dict(), rounded=True)


def samples(tmp: Path) -> Iterator[Item]:
    """(2) All solvers on all grids."""
    for method in METHODS:
        binned, values = digits_model(method), digits_model(method, bins=None)
        for grid in GRIDS:
            yield item(f"{method} {grid} levels", levels_of(binned.method, Sampler(5, "posterior", grid)))
            for solver in [*SOLVERS, "churn:0.3"]:
                drawn = binned.sample(4, steps=5, seed=3, solver=solver, grid=grid)
                yield item(f"{method} {solver} {grid} indices", drawn, rounded=True)
                drawn = values.sample(4, steps=5, seed=3, solver=solver, grid=grid)
                yield item(f"{method} {solver} {grid} values", drawn)
    yield item("bsi default", digits_model("bsi").sample(4, seed=0), rounded=True)
    for name, config in (("unet", UNET), ("mlp", MLP)):
        model = bsi.Model(network(config), METHODS["bsi"], (1, 8, 8)).eval()
        yield item(f"bsi {name} values", model.sample(4, steps=5, seed=3))


def bounds(tmp: Path) -> Iterator[Item]:
    """(3) The ELBO by the paper's protocol, as the command line has it, of finitely many steps, and of the flow."""
    for method in METHODS:
        model, test = digits_model(method), test_digits(64)
        found = model.elbo(test, seed=0)
        for term in ("reconstruction", "measurement", "prior", "sample_variance"):
            yield item(f"{method} elbo {term}", getattr(found, term))
        numbers = (found.bits_per_dim, found.monte_carlo_error, found.data_error)
        yield item(f"{method} elbo bits_per_dim, its errors", np.array(numbers))
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            yield item(f"{method} training loss", model(test))
        steps, eps = torch.arange(64) % 16, standard_normal(5, torch.arange(64), 0, (1, 8, 8))
        for grid in GRIDS:
            levels = named_grid(grid)(model.method, 16)
            with torch.no_grad():
                loss = finite_measurement_loss(
                    model.method, predictor(model), model.values(test), levels, steps, eps
                )  # fmt: skip
            yield item(f"{method} finite measurement loss {grid}", loss)
    for proposal, more in (("loguniform", []), ("fitted", []), ("loguniform", ["--finite-k", "16"])):
        words = ["eval", "digits", "--bpd", "--limit", "48", "--json", "--device", "cpu", "--proposal", proposal, *more]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.chdir(tmp):
            code = command_line(words)
        assert code == 0, f"bsi {' '.join(words)}: exit code {code}"
        numbers = dict(_numbers(json.loads(out.getvalue())))
        name = " ".join(["bsi eval digits --bpd", proposal, *more])
        yield item(f"{name} fields", np.frombuffer("\n".join(sorted(numbers)).encode(), np.uint8))
        yield item(name, np.array([numbers[key] for key in sorted(numbers)], np.float64))
    model = digits_model("bsi")
    uniform = torch.from_numpy(uniforms(1, 0, 256)).float().reshape(4, 1, 8, 8)
    flow = binned_flow(
        model.method, predictor(model), test_digits(4), DIGITS_BINS, uniform, hutchinson(0, (1, 8, 8)), tolerance=0.1
    )
    # Rounded: its steps, each good to the tolerance, are others where the last bits are (3 nats, at AVX2).
    yield item("bsi flow of digits", flow.log_density, rounded=True)
    for method, made in METHODS.items():
        model = bsi.Model(network(MLP, (3,), None), made, (3,), **standardized(0.5, 2.0)).eval()
        x = standard_normal(2, torch.arange(4), 0, (3,))
        found = flow_density(made, predictor(model), x, exact_divergence, tolerance=1e-3)
        yield item(f"{method} flow of vectors", found.log_density)
        yield item(f"{method} flow of vectors, evaluations", np.array(found.evaluations), rounded=True)
        yield item(f"{method} elbo of vectors", model.elbo(x, seed=1).nats)
        yield item(f"{method} samples of vectors", model.sample(4, steps=5, seed=1))


def _numbers(record: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a JSON record by their paths, without times."""
    if isinstance(record, dict):
        for key, value in record.items():
            if not any(word in key for word in ("second", "time", "date", "per_s", "environment")):
                yield from _numbers(value, f"{path}.{key}" if path else key)
    elif isinstance(record, list):
        for index, value in enumerate(record):
            yield from _numbers(value, f"{path}.{index}")
    elif isinstance(record, int | float) and math.isfinite(record):
        yield path, float(record)


def metrics(tmp: Path) -> Iterator[Item]:
    """(4) Features and distances."""
    digits = test_digits(128)
    images = (digits.float() * (255 / 16)).round().to(torch.uint8).expand(-1, 3, -1, -1).contiguous()
    extractor = DigitsFeatures()
    yield item("digits features", extractor(images))
    real, drawn = (standard_normal(seed, torch.arange(64), 0, (8,)).double() for seed in (0, 1))
    drawn = 1.5 * drawn + 0.25
    a, b = Moments.of(drawn), Moments.of(real)
    yield item("Moments", torch.cat([a.mean[None], a.scatter]))
    parts = Moments.of(drawn[:10]) + Moments.of(drawn[10:])
    yield item("Moments in parts", torch.cat([parts.mean[None], parts.scatter]))
    yield item("Frechet distance, its error", np.array([frechet_distance(a, b), frechet_error(drawn, b)]))
    kid = kernel_distance(drawn, real, block_size=16)
    yield item("KID, its error", np.array([kid.value, kid.standard_error]))
    quality = precision_recall_of(drawn, real)
    yield item("precision, recall", np.array([quality.precision, quality.recall]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are not the published weights
        inception = Inception(_inception_weights(tmp / "inception.safetensors"), "cpu")
    yield item("Inception features of digits, seeded weights", inception(images[:2]))


def _inception_weights(path: Path) -> Path:
    """Seeded weights in the published names, of a size that keeps activations as they are."""
    from safetensors.torch import save_file

    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in sorted(inception_shapes().items()):
        kind = name.rpartition(".")[2]
        if kind == "weight" and len(shape) == 4:
            # Repeated: numbers are drawn for some of the filters, since all 22 million would take longest of all.
            some = torch.randn(min(shape[0], 16), *shape[1:], generator=generator)
            filters = some.repeat(-(-shape[0] // len(some)), 1, 1, 1)[: shape[0]]
            scale = torch.rand(shape[0], 1, 1, 1, generator=generator) + 0.5
            weights[name] = filters * scale * math.sqrt(2 / math.prod(shape[1:]))
        elif kind in ("bias", "running_mean"):
            weights[name] = 0.1 * torch.randn(shape, generator=generator)
        else:
            weights[name] = torch.rand(shape, generator=generator) + 0.5
    save_file(weights, path)
    return path


def order(tmp: Path) -> Iterator[Item]:
    """(5) The order of samples, and the batches of the trainer."""
    for seed, count, shards in ((0, 10, 1), (0, 1498, 16), (1, 1498, 64), (2**63 - 1, 101, 8), (7, 1, 2)):
        name = f"seed {seed}, {count} samples"
        yield item(f"{name}: two epochs", sample_ids(seed, count, 0, 2 * count))
        yield item(f"{name}: from afar", sample_ids(seed, count, 10**12 + 1, 64))
        ranks = [1, 2] if shards > 1 else [1]
        owned = [[r, w, *(span := shards_of(r, w, shards)), span.stop] for w in ranks for r in range(w)]
        yield item(f"{name}: {shards} shards", np.array([number for row in owned for number in row]))
        yield item(f"{name}: coins", coins(seed, 5, 64).astype(np.uint8))
        yield item(f"{name}: uniforms", uniforms(seed, 5, 64))
    seeds = [derive(seed, purpose, *more) for seed, purpose, more in ((0, "init", ()), (3, "levels", (9,)))]
    yield item("derived seeds", np.array(seeds))
    for name, recipe in recipes().items():
        if name not in ("bsi-dit", "bsi-dit-audit", "bsi-dit-labels"):
            continue
        cut = [(p.step, p.shard, p.offset, p.count) for step in (0, 7) for p in pieces(recipe, step, 0, 1)]
        yield item(f"{name} pieces", np.array(cut))
        for start in (0, 7):
            stream = stream_of(recipe, start, recipe.data.labels)
            batches = list(stream.step(start))
            stream.close()
            yield item(f"{name} step {start} data", torch.cat([batch.data for batch in batches]))
            yield item(f"{name} step {start} t", torch.cat([batch.t for batch in batches]))
            yield item(f"{name} step {start} noise", torch.cat([batch.eps for batch in batches]))
            if recipe.data.labels:
                yield item(f"{name} step {start} labels", torch.cat([batch.cond for batch in batches]))


def noise(tmp: Path) -> Iterator[Item]:
    """(6) Philox, its Normals, and paths of them."""
    word = torch.tensor([0, 1, 2**31, 2**32 - 1])
    counter = (word, word.flip(0), word.roll(1), word.roll(2))
    yield item("Philox words", torch.stack(philox(counter, (0xA4093822, 0x299F31D0))))
    yield item("Philox words of zeros", torch.stack(philox((word * 0,) * 4, (0, 0))))
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        yield item(f"normals {name}", torch.stack(normals(counter, (1, 2), dtype)))
        ids = torch.tensor([0, 17, 2**33 + 5])
        yield item(f"standard_normal {name}", standard_normal(2**40 + 3, ids, 6, (3, 5), dtype))
        weights = torch.tensor([0.5, -2.0, 3.0], dtype=dtype)
        summed = weighted_normals(seed_words(9, torch.device("cpu")), ids, torch.tensor([0, 4, 8193]), weights, 7)
        yield item(f"weighted_normals {name}", summed)
        path, steps = BrownianPath(4, ids, (2, 3), dtype), (0.0, 0.01, 0.02, 1.0, 37.5, 1e4, 2e6)
        yield item(f"Brownian increments {name}", torch.stack([path(a, b) for a, b in itertools.pairwise(steps)]))
        ends = (2.0**-20, 2.0**-16, 1.0, 2.0**32, 2.0**33)
        yield item(f"Brownian path {name}", torch.stack([path.at(end) for end in ends]))
        seeded = SeededNoise(4, ids, (2, 3), dtype)
        yield item(f"SeededNoise {name}", torch.stack([seeded(0.0, 1.0) for _ in range(3)]))


def exports(tmp: Path) -> Iterator[Item]:
    """(7) Weights of the bundled network as loaded, and after one more export."""
    bundled = bsi.load("digits")
    yield from hash_of("bundled digits", network_of(bundled).state_dict())
    again = bsi.load(write_export("digits", tmp / "again.safetensors"))
    yield from hash_of("bundled digits, exported again", network_of(again).state_dict())
    described = (again.method == bundled.method, again.bins == bundled.bins, again.shape == bundled.shape)
    yield item("bundled digits, described alike", np.array(described).astype(np.uint8))


def sizes(tmp: Path) -> Iterator[Item]:
    """(8) Parameters and FLOPs in closed form; the weights of seeded networks."""
    shape, bins = (3, 32, 32), 256
    for name in KNOWN_NAMES:
        if name.startswith(("dit-h", "dit-g")):  # newer than the recorded values
            continue
        config = resolve(name)
        costs = [cost(config, shape, bins, classes) for classes in (0, 10)]
        yield item(f"{name} parameters, FLOPs", np.array([(c.parameters, c.flops) for c in costs]))
    for name, config in (("dit", DIT), ("unet", UNET), ("mlp", MLP)):
        made = network(config)
        yield from hash_of(f"{name} at its beginning", made.state_dict(), rounded=True)
        counted = sum(parameter.numel() for parameter in made.parameters())
        costs = cost(config, (1, 8, 8), 17)
        yield item(f"tiny {name} parameters, closed form, FLOPs", np.array([counted, costs.parameters, costs.flops]))


# --- what version 0.1.0 wrote -----------------------------------------------------------------------------------------


def legacy_recipe(method: str, steps: int) -> Recipe:
    """Constant rates, so that the run can be extended; Muon and AdamW, averages, an evaluation and samples."""
    recipe = tiny(method, replace(DIT, depth=1), steps=steps, name="digits", samples=Samples(4, Sampler(4)))
    every = Every(journal=1, evaluate=10, sample=20, checkpoint=20)
    return with_optimizer(replace(recipe, every=every), schedule="constant", final_lr=0.0)


def write_legacy(tmp: Path) -> None:
    if bsi.__version__ != "0.1.0":
        raise SystemExit(f"these are the files of version 0.1.0, and this is {bsi.__version__}")
    shutil.rmtree(LEGACY_RUN, ignore_errors=True)
    train(legacy_recipe("bsi", 20), LEGACY_RUN)
    LEGACY_EXPORT.unlink(missing_ok=True)
    write_export(train(legacy_recipe("vdm", 20), tmp / "vdm"), LEGACY_EXPORT)


def legacy(tmp: Path) -> Iterator[Item]:
    """(9) A run and an export of version 0.1.0: their outputs when loaded, and the resumed run."""
    for name, path in (("run", LEGACY_RUN), ("export", LEGACY_EXPORT)):
        model = bsi.load(path)
        yield from hash_of(f"{name} weights", network_of(model).state_dict())
        yield item(f"{name} sample", model.sample(4, steps=5, seed=0), rounded=True)
        yield item(f"{name} elbo", model.elbo(test_digits(8), seed=0).nats)
    yield from hash_of("run weights without averaging", network_of(bsi.load(LEGACY_RUN, ema=False)).state_dict())
    yield from journal_items("run journal", LEGACY_RUN)
    copy = tmp / "run"
    shutil.copytree(LEGACY_RUN, copy)
    yield from journal_items("run resumed", train(legacy_recipe("bsi", 25), copy), after=20)
    yield from hash_of("run resumed weights", network_of(bsi.load(copy, ema=False)).state_dict(), rounded=True)


GROUPS: dict[str, Group] = {
    "training": training,
    "samples": samples,
    "bounds": bounds,
    "metrics": metrics,
    "order": order,
    "noise": noise,
    "exports": exports,
    "sizes": sizes,
    "legacy": legacy,
}


# --- recording and comparing ------------------------------------------------------------------------------------------


def about() -> dict[str, str]:
    """What the last bits depend on besides the code."""
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def same_machine(recorded: dict[str, str]) -> bool:
    """Whether the same bits are to be expected."""
    return all(recorded[key] == about()[key] for key in ("torch", "capability", "machine"))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread, default types, and no data folder, ranks or cache of the user."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    known = ("BSI_DATA", "RANK", "WORLD_SIZE", "SLURM_PROCID")
    before = {name: os.environ.pop(name) for name in known if name in os.environ}
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        os.environ.update(before)


def compute(group: str) -> Iterator[Item]:
    """The items of a group, named after it."""
    with tempfile.TemporaryDirectory() as tmp, alone():
        for found in GROUPS[group](Path(tmp)):
            yield replace(found, name=f"{group}: {found.name}")


@dataclass(frozen=True)
class Comparison:
    name: str
    good: bool
    says: str

    def __str__(self) -> str:
        return f"{'  ' if self.good else '! '}{self.name}: {self.says}"


def compare(found: Item, recorded: dict[str, Any] | None, strict: bool) -> Comparison:
    """`strict` compares hashes; otherwise values to 1e-5, integers exactly, and rounded ones not at all."""
    if recorded is None:
        return Comparison(found.name, False, "not recorded")
    if found.sha256 == recorded["sha256"]:
        return Comparison(found.name, True, "same")
    if list(found.array.shape) != recorded["shape"]:
        return Comparison(found.name, False, f"shape {list(found.array.shape)}, was {recorded['shape']}")
    here, there = (np.asarray(values, np.float64) for values in (found.values, recorded["values"]))
    with np.errstate(invalid="ignore"):
        apart = float(np.nanmax(np.abs(here - there), initial=0.0))
    says = f"max difference {apart:.3g}, of values up to {float(np.nanmax(np.abs(there), initial=0.0)):.3g}"
    if strict or found.kind == EXACT:
        return Comparison(found.name, False, says)
    close = found.kind == ROUNDED or np.allclose(here, there, rtol=CLOSE, atol=CLOSE, equal_nan=True)
    return Comparison(found.name, bool(close), f"{says} (another machine or torch: hashes are not compared)")


def compared(group: str) -> Iterator[Comparison]:
    """Compare every item of a group, and report recorded items that no longer exist."""
    recorded = json.loads(VALUES.read_text("utf-8"))
    strict, left = same_machine(recorded["about"]), [n for n in recorded["items"] if n.startswith(f"{group}: ")]
    for found in compute(group):
        if found.name in left:
            left.remove(found.name)
        yield compare(found, recorded["items"].get(found.name), strict)
    yield from (Comparison(name, False, "recorded, and not computed any more") for name in left)


def write(groups: list[str]) -> None:
    """Record these groups; others stay as they were recorded, if that was on such a machine."""
    items = {}
    if VALUES.exists() and same_machine((recorded := json.loads(VALUES.read_text("utf-8")))["about"]):
        items = {n: value for n, value in recorded["items"].items() if n.partition(":")[0] in {*GROUPS} - {*groups}}
    items.update((found.name, found.record()) for group in groups for found in compute(group))
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in items.items())
    text = f'{{\n  "about": {json.dumps(about())},\n  "items": {{\n{lines}\n  }}\n}}\n'
    VALUES.write_text(text, "utf-8")
    print(f"{len(items)} items in {VALUES}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare with what was recorded, or record.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--write", action="store_true", help="record anew")
    parser.add_argument("--write-legacy", action="store_true", help="write the run and export of version 0.1.0")
    args = parser.parse_args()
    groups = args.groups or list(GROUPS)
    if unknown := [group for group in groups if group not in GROUPS]:
        parser.error(f"unknown groups {unknown}: known are {', '.join(GROUPS)}")
    if args.write_legacy:
        with tempfile.TemporaryDirectory() as tmp, alone():
            write_legacy(Path(tmp))
    if args.write:
        write(groups)
        return 0
    bad = 0
    for group in groups:
        for line in compared(group):
            bad += not line.good
            print(line, flush=True)
    print(f"{bad} differ" if bad else "all as recorded")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
