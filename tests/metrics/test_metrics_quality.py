"""From batches of images to a record, with a reference that is stored: row 28 of docs/reliability.md."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, UInt8
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
from bsi.metrics.quality import metric_name, reference


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


def test_the_record_says_everything_one_needs_to_compare() -> None:
    samples = collect(images(60, 0, darkest=40).split(16), Colors(), keep=True)
    how = Generation("sde2", 16, seed=3)
    quality = sample_quality(samples, real(keep=True), Colors(), kid=True, precision_and_recall=True, generation=how)
    record = json.loads(json.dumps(quality.record()))
    assert {name: record[name] for name in ("metric", "n", "reference", "reference_split", "reference_n")} == {
        "metric": "fd-colors",
        "n": 60,
        "reference": "toy",
        "reference_split": "test",
        "reference_n": 50,
    }
    assert (record["extractor"], record["extractor_hash"], record["resize"]) == ("colors", "c0", "none")
    assert record["generation"] == {"solver": "sde2", "evaluations": 16, "seed": 3}
    assert record["value"] > 0
    assert record["error"] == frechet_error(samples.vectors, real().features.moments) > 0
    assert sample_quality(Features(samples.moments), real(), Colors()).error is None, "features were not kept"
    assert record["kid"]["value"] > 0
    assert 0 < record["precision_recall"]["precision"] < 1
    assert record["cautions"] == []


def test_distance_of_a_set_to_itself_is_zero() -> None:
    samples = collect(images(50, 1).split(50), Colors())
    assert abs(sample_quality(samples, real(), Colors()).value) < 1e-10


def test_only_the_published_weights_make_an_fid() -> None:
    extractor: Extractor = Colors(name="inception-2015-12-05")
    assert metric_name(extractor) == "fd-inception-2015-12-05"


def test_a_singular_covariance_is_warned_of_and_noted() -> None:
    samples = collect([images(6, 0)], Colors())
    with pytest.warns(QualityWarning, match="6 images of samples leave the covariance of 6 features singular"):
        quality = sample_quality(samples, real(), Colors())
    assert len(quality.cautions) == 1


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_images_are_refused(n: int) -> None:
    with pytest.raises(DataError, match=f"at least 2 images of each set: samples has {n}"):
        sample_quality(collect([images(n, 0), images(0, 0)], Colors()), real(), Colors())


def test_nan_features_are_refused() -> None:
    bad = Features(Moments.of(torch.full((20, 6), torch.nan)))
    with pytest.raises(NonFinite, match="NaN or infinity"):
        sample_quality(bad, real(), Colors())


def test_float_images_are_refused_before_the_extractor_sees_them() -> None:
    with pytest.raises(DataError, match="never truncate"):
        collect([images(4, 0).float()], Colors())


def test_kid_without_kept_features_says_so() -> None:
    with pytest.raises(UsageError, match="keep=True"):
        sample_quality(collect([images(40, 0)], Colors()), real(), Colors(), kid=True)


def test_batches_of_any_size_give_the_same_features() -> None:
    whole, parts = (collect(images(30, 2).split(size), Colors(), keep=True) for size in (30, 7))
    torch.testing.assert_close(parts.moments.scatter, whole.moments.scatter, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts.vectors, whole.vectors, rtol=0, atol=0)


class Once:
    """Batches that count how often they are read."""

    def __init__(self, n: int = 40) -> None:
        self.reads, self.n = 0, n

    def __iter__(self) -> Iterator[Tensor]:
        self.reads += 1
        yield from images(self.n, 5).split(16)


def test_a_reference_is_computed_once(tmp_path: Path) -> None:
    batches = Once()
    first = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    second = reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    assert batches.reads == 1
    assert second.features.n == 40
    torch.testing.assert_close(second.features.moments.scatter, first.features.moments.scatter, rtol=0, atol=0)
    assert not list(tmp_path.glob(".*")), "temporary files are left"


@pytest.mark.parametrize(
    ("version", "split", "extractor"),
    [
        ("v2", "test", Colors()),
        ("v1", "train", Colors()),
        ("v1", "test", Colors(hash="c1")),
        ("v1", "test", Colors(resize="other")),
        ("v1", "test", Colors(precision="tf32")),
    ],
)
def test_other_data_or_another_extractor_is_a_miss(
    tmp_path: Path, version: str, split: str, extractor: Extractor
) -> None:
    batches = Once()
    reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    reference("toy", version, split, batches, extractor, folder=tmp_path)
    assert batches.reads == 2


def test_kept_vectors_are_stored_when_first_asked_for(tmp_path: Path) -> None:
    batches = Once()
    reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    kept = reference("toy", "v1", "test", batches, Colors(), keep=True, folder=tmp_path)
    again = reference("toy", "v1", "test", batches, Colors(), keep=True, folder=tmp_path)
    assert batches.reads == 2
    torch.testing.assert_close(again.features.vectors, kept.features.vectors, rtol=0, atol=0)
    assert reference("toy", "v1", "test", batches, Colors(), folder=tmp_path).features.vectors is None


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
    torch.testing.assert_close(mended.features.moments.scatter, whole.features.moments.scatter, rtol=0, atol=0)
    reference("toy", "v1", "test", batches, Colors(), folder=tmp_path)
    assert batches.reads == 2


def test_a_reference_under_another_ones_name_is_computed_again(tmp_path: Path) -> None:
    batches = Once()
    reference("toy", "v1", "test", batches, Colors(), folder=tmp_path / "a")
    reference("toy", "v2", "test", batches, Colors(), folder=tmp_path / "b")
    for theirs in (tmp_path / "b").iterdir():
        (ours,) = (tmp_path / "a").glob(f"*{theirs.suffix}")
        theirs.write_bytes(ours.read_bytes())
    with pytest.warns(QualityWarning, match="computed again"):
        reference("toy", "v2", "test", batches, Colors(), folder=tmp_path / "b")
    assert batches.reads == 3


def test_a_cache_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(QualityWarning, match="not stored"):
        result = reference("toy", "v1", "test", Once(), Colors(), folder=tmp_path / "file")
    assert result.features.n == 40


def test_an_empty_reference_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gave 1"):
        reference("toy", "v1", "test", Once(n=1), Colors(), folder=tmp_path)
