"""From images in files and arrays to a record with a stored reference: row 28 of docs/reliability.md."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from bsi.errors import DataError, NonFinite, UsageError
from bsi.metrics import (
    Extractor,
    Features,
    Generation,
    Moments,
    QualityWarning,
    Reference,
    collect,
    frechet_error,
    sample_quality,
)
from bsi.metrics.quality import array_batches, file_batches, metric_name, reference

# ---- Records and references ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Colors:
    """The extractor of these tests: mean and standard deviation of each color."""

    name: str = "colors"
    hash: str = "c0"
    resize: str = "none"
    precision: str = "float32"
    dim: int = 6
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n 6"]:
        pixels = images.float() / 255
        return torch.cat([pixels.mean((2, 3)), pixels.std((2, 3))], 1)


def images(n: int, seed: int, darkest: int = 0) -> UInt8[Tensor, "n 3 4 4"]:
    return torch.randint(darkest, 256, (n, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def real(n: int = 50, seed: int = 1, keep: bool = False) -> Reference:
    return Reference("toy", "test", "v1", collect(images(n, seed).split(7), Colors(), keep))


def test_the_record_of_a_distance_holds_all_settings() -> None:
    samples = collect(images(60, 0, darkest=40).split(16), Colors(), keep=True)
    how = Generation("sde2", 16, seed=3)
    quality = sample_quality(samples, real(keep=True), Colors(), kid=True, precision_and_recall=True, generation=how)
    record = json.loads(json.dumps(quality.record()))
    described = {
        "metric": "fd-colors",
        "n": 60,
        "cautions": [],
        "reference": "toy",
        "reference_split": "test",
        "reference_version": "v1",
        "reference_n": 50,
        "extractor": "colors",
        "extractor_hash": "c0",
        "resize": "none",
        "precision": "float32",
        "generation": {"solver": "sde2", "evaluations": 16, "seed": 3},
    }
    assert {name: record[name] for name in described} == described
    assert record["value"] > 0
    assert record["error"] == frechet_error(samples.vectors, real().features.moments) > 0
    assert sample_quality(Features(samples.moments), real(), Colors()).error is None, "features were not kept"
    assert record["kid"]["value"] > 0
    assert 0 < record["precision_recall"]["precision"] < 1


def test_distance_of_a_set_to_itself_is_zero() -> None:
    samples = collect(images(50, 1).split(50), Colors())
    assert abs(sample_quality(samples, real(), Colors()).value) < 1e-10


def test_only_the_published_weights_make_an_fid() -> None:
    extractor: Extractor = Colors(name="inception-2015-12-05")
    assert metric_name(extractor) == "fd-inception-2015-12-05"


def test_a_singular_covariance_gives_a_recorded_warning() -> None:
    samples = collect([images(6, 0)], Colors())
    with pytest.warns(QualityWarning, match="6 images of samples leave the covariance of 6 features singular"):
        quality = sample_quality(samples, real(), Colors())
    assert len(quality.cautions) == 1


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_images_are_rejected(n: int) -> None:
    with pytest.raises(DataError, match=f"at least 2 images of each set: samples has {n}"):
        sample_quality(collect([images(n, 0), images(0, 0)], Colors()), real(), Colors())


def test_nan_features_are_rejected() -> None:
    bad = Features(Moments.of(torch.full((20, 6), torch.nan)))
    with pytest.raises(NonFinite, match="NaN or infinity"):
        sample_quality(bad, real(), Colors())


def test_kid_needs_the_features_themselves() -> None:
    with pytest.raises(UsageError, match="keep=True"):
        sample_quality(collect([images(40, 0)], Colors()), real(), Colors(), kid=True)


class Once:
    """Batches that count how often they are read."""

    def __init__(self, n: int = 40) -> None:
        self.reads, self.n = 0, n

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        yield from images(self.n, 5).split(16)


def test_a_reference_is_computed_once_for_the_same_data_and_extractor(tmp_path: Path) -> None:
    batches = Once()
    first = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    second = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    assert (batches.reads, second.features.n, second.features.vectors) == (1, 40, None)
    assert torch.equal(second.features.moments.scatter, first.features.moments.scatter)
    assert not list(tmp_path.glob(".*")), "temporary files are left"
    kept, again = (reference("toy", "v1", "test", batches, Colors(), keep=True, folder=tmp_path) for _ in range(2))
    assert batches.reads == 2, "the vectors were not kept before"
    assert torch.equal(again.features.vectors, kept.features.vectors)
    assert reference("toy", "v1", "test", batches, Colors(), folder=tmp_path).features.vectors is None
    others = [("v2", "test", Colors()), ("v1", "train", Colors())]
    others += [("v1", "test", Colors(**{name: "other"})) for name in ("hash", "resize", "precision")]
    for reads, (version, split, extractor) in enumerate(others, 3):
        reference("toy", version, split, batches, extractor, folder=tmp_path)
        assert batches.reads == reads


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_damaged_reference_is_computed_again(tmp_path: Path, suffix: str) -> None:
    batches = Once()
    whole = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    (path,) = tmp_path.glob(f"*.{suffix}")
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    with pytest.warns(QualityWarning, match="computed again"):
        mended = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    assert batches.reads == 2
    assert torch.equal(mended.features.moments.scatter, whole.features.moments.scatter)
    reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    assert batches.reads == 2


def test_a_reference_that_cannot_be_stored_is_still_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(QualityWarning, match="not stored"):
        assert reference("toy", "v1", "test", Once(), Colors(), folder=tmp_path / "file").features.n == 40


# ---- Images of files and arrays --------------------------------------------------------------------------------------


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_a_folder_is_read_in_order_and_batched_by_size(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    shapes = {"a.png": (4, 5), "b.bmp": (4, 5), "c.PNG": (4, 5), "deep/d.png": (6, 5)}
    for seed, (name, shape) in enumerate(shapes.items()):
        Image.fromarray(picture(*shape, seed)).save(tmp_path / name)
    batches = list(file_batches([tmp_path / name for name in shapes], size=2))
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 4, 5), (1, 3, 4, 5), (1, 3, 6, 5)]
    np.testing.assert_array_equal(batches[0][1].numpy(), picture(4, 5, 1).transpose(2, 0, 1))


def test_unusable_files_are_named(tmp_path: Path) -> None:
    Image.fromarray(picture(4, 4)).convert("CMYK").save(tmp_path / "cmyk.jpg")
    with pytest.raises(DataError, match=r"cmyk\.jpg is CMYK"):
        next(file_batches([tmp_path / "cmyk.jpg"], 1))


def test_arrays_of_every_layout_become_three_channels_first() -> None:
    last = np.stack([picture(4, 5, seed) for seed in range(5)])
    first = torch.from_numpy(last).permute(0, 3, 1, 2)
    for array in (last, first.numpy()):
        torch.testing.assert_close(torch.cat(list(array_batches([array[:3], array[3:]], 2, "x"))), first)
    gray = last[..., 0]
    for array in (gray, gray[:, None], gray[..., None]):
        torch.testing.assert_close(next(array_batches([array], 8, "x")), first[:, :1].expand(-1, 3, -1, -1))


@pytest.mark.parametrize("shape", [(2, 3, 8, 3), (2, 4, 8, 8), (2, 8), (2, 3, 8, 8, 1)])
def test_ambiguous_shapes_are_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="with 1 or 3 channels, got"):
        next(array_batches([np.zeros(shape, np.uint8)], 2, "x"))
    with pytest.raises(DataError, match=r"x must be 8-bit.*float32.*never truncate"):
        next(array_batches([np.zeros((2, 3, 8, 8), np.float32)], 2, "x"))
