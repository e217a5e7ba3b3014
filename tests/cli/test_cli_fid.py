"""`bsi fid` on folders, arrays and datasets, with a small extractor in the place of Inception."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bsi.metrics
from bsi.cli.eval import Fid, images
from bsi.cli.options import parse
from bsi.errors import DataError


class Corners:
    """Three features: the mean of each color in the upper left quarter, which the tests can compute exactly."""

    name, hash, resize, precision, dim, device = "corners", "c0", "none", "float32", 3, torch.device("cpu")

    seen = 0

    def __init__(self, weights: Path | None, device: str, precision: str | None, batch: int) -> None:
        self.batch = batch

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        assert len(images) <= self.batch
        Corners.seen += len(images)
        return images[:, :, : images.shape[2] // 2, : images.shape[3] // 2].float().mean((2, 3))


@pytest.fixture
def quality(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., dict[str, object]]:
    """Run the command with --json and return its record."""
    monkeypatch.setattr(bsi.metrics, "Inception", Corners)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "cache"))

    def run(*words: str) -> dict[str, object]:
        assert parse(Fid, [*words, "--json", "--batch", "4"], "bsi fid").execute() == 0
        return json.loads(capsys.readouterr().out)

    return run


def pixels(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for index, image in enumerate(pixels(10, 0)):
        Image.fromarray(image).save(f"folder/{index:03d}.png")
    np.save("a.npy", pixels(10, 0))
    np.savez("a.npz", arr_0=pixels(10, 0), label=np.zeros(10))
    np.save("b.npy", pixels(12, 1).transpose(0, 3, 1, 2))
    np.savez("two.npz", x=pixels(2, 0), y=pixels(2, 0))
    np.save("float.npy", pixels(4, 0) / 255)
    return tmp_path


def test_a_folder_and_its_arrays_are_one_set(quality, sets):
    records = [quality(name, "b.npy") for name in ("folder", "a.npy", "a.npz")]
    assert (records[0]["n"], records[0]["reference_n"], records[0]["metric"]) == (10, 12, "fd-corners")
    assert records[0]["value"] > 1
    assert records[0]["value"] == records[1]["value"] == records[2]["value"]
    assert abs(quality("folder", "a.npz")["value"]) < 1e-6


def test_num_limits_the_images_of_both_sets(quality, sets):
    np.save("first.npy", pixels(10, 0)[:6])
    np.save("second.npy", pixels(12, 1)[:6])
    cut = quality("folder", "b.npy", "--num", "6")
    assert (cut["n"], cut["reference_n"]) == (6, 6)
    assert cut["value"] == quality("first.npy", "second.npy")["value"]


def test_kid_precision_and_recall_are_options(quality, sets):
    plain = quality("a.npy", "b.npy")
    assert plain["kid"] is plain["precision_recall"] is None
    full = quality("a.npy", "b.npy", "--kid", "--precision-recall")
    assert full["kid"]["block_size"] == 10
    assert 0 <= full["precision_recall"]["recall"] <= 1


def test_a_prepared_dataset_is_a_stored_reference(quality, sets):
    record = quality("digits:train", "digits")
    assert (record["reference"], record["reference_split"], record["extractor_hash"]) == ("digits", "test", "c0")
    assert record["reference_version"]
    assert len(list((sets / "cache" / "references").iterdir())) == 2
    Corners.seen = 0
    assert quality("digits:train", "digits")["value"] == record["value"]
    assert Corners.seen == record["n"], "the reference was computed again"


def test_sixteen_gray_levels_are_scaled_to_eight_bits(quality):
    source = images("digits:test", 32, None, ExitStack())
    batches = torch.cat(list(source.batches))
    assert (batches.dtype, batches.shape) == (torch.uint8, (source.n, 3, 8, 8))
    assert set(batches.unique().tolist()) == {round(index * 255 / 16) for index in range(17)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("absent.npy b.npy", "does not exist"),
        ("two.npz b.npy", "holds x, y"),
        ("float.npy b.npy", "never truncate"),
        ("digitz b.npy", "no prepared dataset 'digitz'"),
        ("a.npy b.npy --num 1", "at least 2 images"),
    ],
)
def test_sets_that_cannot_be_compared_are_rejected(quality, sets, words, message):
    with pytest.raises(DataError, match=message):
        quality(*words.split())


def test_warnings_go_to_stderr_and_the_result_names_the_set(quality, sets, capsys):
    assert Fid("a.npy", "b.npy", num=3, kid=True).execute() == 0
    out, err = capsys.readouterr()
    assert out.startswith("fd-corners ")
    assert "3 images of a.npy against 3 of b.npy" in out
    assert "KID" in out
    assert "bsi fid: warning: 3 images of samples leave the covariance of 3 features singular" in err
