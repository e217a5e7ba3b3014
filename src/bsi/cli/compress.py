"""`bsi compress RUN DATA` and `bsi decompress FILE RUN`: lossless compression with a trained model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import tyro
from PIL import Image

from bsi import pictures
from bsi.cli.options import BatchSize, Count, Device, Json, RunPath, Within, answer
from bsi.data import files, store
from bsi.data.baselines import baselines
from bsi.data.images import SUFFIXES, open_image
from bsi.errors import DataError, UsageError
from bsi.io import atomic, check_writable, make_folder, open_untrusted
from bsi.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from bsi.model import Model

MEASURED = 256  # samples that the rate of --lossy-steps is measured with
MAX_BYTES = 1 << 36  # of a compressed file


@dataclass(frozen=True)
class Compress:
    """Compress images or other binned data without loss, to about the size of the model's bound.

    Decompressing needs the same model and a machine of the same type: predictions must agree to the last bit. A
    machine with other predictions is detected before decoding. Use it for measurements and transfer, not for archives.
    """

    run: RunPath
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A prepared dataset by name or folder, a .npy array of bin indices, or a folder of images."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]  # The compressed file.
    split: Literal["test", "train"] = "test"  # The part of a prepared dataset.
    limit: Count | None = None  # Compress only the first samples.
    steps: Annotated[int, Within(1, 100_000)] = 64
    """Steps of the chain of latents: more steps tighten the bound and take longer."""
    variance: Literal["none", "level", "pixels", "dct", "learned"] = "level"
    """The predictive variance in each step, fitted to training samples of the run's dataset."""
    batch_size: BatchSize = 256  # Samples coded together, at most: batches grow with the file.
    bound: bool = True  # With --no-bound, do not evaluate the bound of the same data.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        from bsi import codec
        from bsi.evaluation.runs import fitted_variance
        from bsi.runtime import export
        from bsi.runtime.distributed import pick_device

        check_writable(self.out, "--out")
        trained = export.read_trained(self.run)
        model = export.model_of(trained, str(self.run)).to(pick_device(self.device, 0))
        index = _indices(self, model)
        codec.check_indices(model, index)
        variance = None if self.variance == "none" else fitted_variance(model, trained.data.name, self.variance)
        started = time.perf_counter()
        with Progress("compress", len(index) * (self.steps + 1), "evaluation") as progress:
            packed = codec.compress(
                model, index, self.steps, variance, self.batch_size, lambda step, x_hat: progress.advance(len(x_hat))
            )
        seconds = time.perf_counter() - started
        with atomic(self.out, "--out") as temporary:
            temporary.write_bytes(packed.blob)
        record: dict[str, Any] = {
            "samples": packed.samples,
            "bytes": len(packed.blob),
            "net_bits_per_dim": packed.net_bits_per_dim,
            "gross_bits_per_dim": packed.gross_bits_per_dim,
            "initial_bits": packed.initial_bits,
            "plain_samples": packed.plain,
            "steps": self.steps,
            "variance": self.variance,
            "seconds": round(seconds, 3),
            "files": [str(self.out)],
        }
        lines = [
            f"{self.out}: {packed.samples} samples in {len(packed.blob)} bytes, {packed.gross_bits_per_dim:.4f} "
            f"bits/dim, {seconds:.1f} s",
            f"  each sample beyond the first {packed.plain}: {packed.net_bits_per_dim:.4f} bits/dim; the first ones "
            f"are stored uncompressed, in {packed.initial_bits} bits",
        ]
        if self.bound:
            found = model.elbo(index, finite_k=self.steps, variance=variance, batch_size=self.batch_size, progress=True)
            record |= {"bound_bits_per_dim": found.bits_per_dim, "bound_error": found.monte_carlo_error}
            lines.append(f"  bound: {found.bits_per_dim:.4f} bits/dim ± {found.monte_carlo_error:.4f} (Monte Carlo)")
        others = baselines(index.numpy(), index.numpy(), model.bins) if model.bins else {}
        others.pop("histogram", None)  # it is of training samples
        if others:
            record |= {f"{name.lower().replace(' ', '_')}_bits_per_dim": bits for name, bits in others.items()}
            lines.append(f"  {', '.join(f'{name} {bits:.4f}' for name, bits in others.items())} bits/dim")
        return answer(self.json, record, "\n".join(lines))


@dataclass(frozen=True)
class Decompress:
    """Decompress a file that `bsi compress` wrote, with the model that compressed it."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]  # The compressed file.
    run: RunPath
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """A .npy file for the array of bin indices, or a folder for images (.png)."""
    lossy_steps: int | None = None
    """Write the predictions after this many steps instead of the data, and print the rate that was spent until then;
    samples stored uncompressed stay exact."""
    preview: Path | None = None
    """A .gif or .webp of the predictions of some samples while they are decoded, from coarse to fine."""
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        import torch

        from bsi import codec
        from bsi.runtime.distributed import pick_device
        from bsi.runtime.export import load

        if self.out.suffix == ".npy":
            check_writable(self.out, "--out")
        if self.preview is not None:
            check_writable(self.preview, "--preview")
        with open_untrusted(self.file, MAX_BYTES) as file:
            blob = file.read()
        model = load(self.run).to(pick_device(self.device, 0))
        first: list[Tensor] = []  # the predictions of the first batch, step by step
        rough: list[Tensor] = []  # the predictions after --lossy-steps, batch by batch

        def watch(step: int, x_hat: Tensor) -> None:
            progress.advance(len(x_hat))
            if step == len(first):
                first.append(x_hat.cpu())
            if step == self.lossy_steps:
                rough.append(x_hat.cpu())

        started = time.perf_counter()
        with Progress("decompress", codec.evaluations(blob), "evaluation") as progress:
            index = codec.decompress(model, blob, watch)
        seconds, rate, spent = time.perf_counter() - started, dict[str, float](), ""
        if self.lossy_steps is not None:
            if not rough:
                raise UsageError(f"{self.file} has {len(first) - 1} steps, got --lossy-steps {self.lossy_steps}.")
            predicted = model.data(torch.cat(rough[::-1]).float()).to(index.dtype)
            exact = len(index) - len(predicted)  # the first ones are stored without x_hat
            rate = _rate(blob, model, index[exact:], self.lossy_steps)
            index = torch.cat([index[:exact], predicted])
            spent = (
                f"\n  {self.lossy_steps} steps: about {rate['rate_bits_per_dim']:.4f} bits/dim, mean squared error "
                f"{rate['squared_error']:.4g}"
            )
        _write(self.out, index.numpy(), model)
        if self.preview is not None:
            if not pictures.is_image(model.shape) or model.bins is None:
                raise UsageError("--preview shows images: this data has none.")
            frames = [pictures.grid(x_hat.numpy(), None, model.bins.low, model.bins.high) for x_hat in first]
            with atomic(self.preview, "--preview") as temporary:
                pictures.animate(frames, temporary)
        written = [str(path) for path in (self.out, self.preview) if path is not None]
        record = {"samples": len(index), "seconds": round(seconds, 3), **rate, "files": written}
        return answer(self.json, record, f"{len(index)} samples in {seconds:.1f} s: {', '.join(written)}{spent}")


def _indices(args: Compress, model: Model) -> Tensor:
    """The data as bin indices of the model's shape."""
    import torch

    path = Path(args.data)
    if path.suffix == ".npy" and not path.is_dir():
        with files.ArrayFile.at(path) as file:
            if file.dtype.kind not in "ui":
                raise DataError(f"{path} has dtype {file.dtype}, expected integers: the indices of bins.")
            empty = np.zeros((0, *file.shape[1:]), file.dtype)
            rows = np.concatenate([empty, *(block.copy() for block in file.blocks())])
    elif path.is_dir() and not (path / "manifest.json").exists():
        rows = _images(path, model)
    else:
        dataset = store.open_dataset(args.data)
        if dataset.bins != model.bins:
            raise DataError(f"{args.data} has {dataset.bins}, the model {model.bins}: they do not fit.")
        rows = np.asarray(dataset.split(args.split))
    rows = rows[: args.limit]
    if not len(rows):
        raise DataError(f"{args.data} holds no samples.")
    wide = rows.dtype.kind == "u" and rows.itemsize > 1
    return torch.from_numpy(np.array(rows, "int32" if wide else rows.dtype))  # a copy: a dataset is read-only


def _images(folder: Path, model: Model) -> np.ndarray:
    """All images of a folder, sorted by name. They must have the model's size."""
    if not pictures.is_image(model.shape) or model.bins is None or model.bins.count != 256:
        raise UsageError(f"{folder} is a folder of images, and this model is for {model.bins} of shape {model.shape}.")
    channels, height, width = model.shape
    rows = [np.zeros((0, *model.shape), np.uint8)]
    for name in sorted(files.walk(folder, SUFFIXES)):
        image = open_image(folder / name, str(folder / name)).convert("RGB" if channels == 3 else "L")
        if image.size != (width, height):
            sizes = f"{image.width} x {image.height} pixels, the model {width} x {height}"
            raise DataError(f"{folder / name} has {sizes}. `bsi data folder` prepares images of one size.")
        rows.append(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)[None])
    return np.concatenate(rows)


def _rate(blob: bytes, model: Model, index: Tensor, steps: int) -> dict[str, float]:
    """The rate that is spent in the first steps of the chain of a file, and the error of the predictions after them."""
    from bsi.codec_file import read_variance, unpack
    from bsi.evaluation.likelihoods import rate_distortion

    header, _ = unpack(blob)
    with model.evaluating():
        on_data = replace(model.on(index[:MEASURED]), variance=read_variance(header.variance, model))
        found = rate_distortion(on_data, header.steps)
    return {"rate_bits_per_dim": found.bits_per_dim[steps], "squared_error": found.squared_error[steps]}


def _write(out: Path, index: np.ndarray, model: Model) -> None:
    """A .npy file, or a folder of images."""
    if out.suffix == ".npy":
        with atomic(out, "--out") as temporary, temporary.open("wb") as file:
            np.save(file, index, allow_pickle=False)
        return
    if not pictures.is_image(model.shape) or index.dtype != np.uint8:
        raise UsageError(f"{out} should end in .npy: this data has no images.")
    make_folder(out, "--out")
    for i, image in enumerate(index):
        with atomic(out / f"{i:06d}.png", "--out") as temporary:
            Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(temporary, "PNG")
