"""`bsi compress` and `bsi decompress`: the file on disk, and the restored data."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsi import BSI, Bins, Model
from bsi.backbones import build
from bsi.backbones.config import MLPConfig
from bsi.cli import main
from bsi.data import open_dataset

pytest.importorskip("constriction")


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.chdir(tmp_path)
    return np.asarray(open_dataset("digits").test[:20])


def bsi(words: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """The record that a command prints."""
    assert main([*words.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_digits_come_back(rows, capsys, monkeypatch):
    monkeypatch.setattr("bsi.evaluation.runs.FITTED", 64)
    record = bsi("compress digits digits --split test --limit 20 -o d.bsi --steps 3", capsys)
    assert record["bytes"] == Path("d.bsi").stat().st_size
    names = {f"{name}_bits_per_dim" for name in ("net", "gross", "bound", "png", "webp")}
    assert names | {"initial_bits", "plain_samples", "bound_error"} <= set(record)
    bsi("decompress d.bsi digits -o out.npy --preview preview.gif", capsys)
    assert np.array_equal(np.load("out.npy"), rows)
    assert Path("preview.gif").exists()


def test_arrays_become_images_or_predictions(rows, capsys):
    np.save("in.npy", rows)
    assert main(["compress", "digits", "in.npy", "-o", "a.bsi", "--steps", "3", "--variance", "none"]) == 0
    assert "bound:" in capsys.readouterr().out
    bsi("decompress a.bsi digits -o images", capsys)
    assert len(list(Path("images").glob("*.png"))) == 20
    errors, rates = [], []
    for steps in (1, 3):
        record = bsi(f"decompress a.bsi digits -o rough.npy --lossy-steps {steps}", capsys)
        errors.append(np.mean(np.load("rough.npy") != rows))
        rates.append(record["rate_bits_per_dim"])
    assert errors[1] < errors[0] < 1
    assert 0 < rates[0] < rates[1]
    assert main(["decompress", "a.bsi", "digits", "-o", "rough.npy", "--lossy-steps", "4"]) == 2


def network(folder: str, shape: tuple[int, ...], bins: Bins) -> None:
    """Save a model without training."""
    backbone = MLPConfig(width=8, depth=1)
    Model(build(backbone, shape, bins.count), BSI(alpha_M=1e6), shape, bins).save_pretrained(folder)


def test_folders_of_images_come_back_as_the_same_pixels(rows, capsys):
    network("net", (3, 4, 4), Bins.uint8())
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    Path("in").mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(f"in/{i}.png")
    record = bsi("compress net in -o a.bsi --steps 3 --variance none --no-bound", capsys)
    assert record["samples"] == 5
    bsi("decompress a.bsi net -o out", capsys)
    assert np.array_equal(np.stack([np.asarray(Image.open(path)) for path in sorted(Path("out").iterdir())]), images)
    Image.fromarray(images[0, :3]).save("in/narrow.png")
    assert main(["compress", "net", "in", "-o", "b.bsi", "--variance", "none"]) != 0
    assert "4 x 3" in capsys.readouterr().err
    assert not Path("b.bsi").exists()


def test_sound_of_16_bits_comes_back(rows, capsys):
    network("net", (1, 64), Bins.int16())
    sound = np.cumsum(np.random.default_rng(0).integers(-300, 300, (6, 1, 64)), 2).clip(-32768, 32767) + 32768
    np.save("in.npy", sound.astype(np.uint16))
    record = bsi("compress net in.npy -o a.bsi --steps 3 --variance none --no-bound", capsys)
    assert {"linear_prediction_bits_per_dim", "lzma_bits_per_dim"} <= set(record)
    bsi("decompress a.bsi net -o out.npy", capsys)
    assert np.array_equal(np.load("out.npy"), sound)


@pytest.mark.parametrize(
    ("data", "words", "code", "why"),
    [
        ("rows", "--steps 0", 2, "--steps must be at least 1"),
        ("rows", "--steps 100001", 2, "--steps must be at most 100000"),
        ("rows[:0]", "", 3, "holds no samples"),
        ("rows[:, :, :4]", "", 2, "shape"),
        ("rows + 20", "", 3, "outside its bins"),
        ("rows / 16", "", 3, "expected integers"),
    ],
)
def test_unsuitable_data_is_rejected_before_a_variance_is_fitted(rows, capsys, data, words, code, why):
    np.save("in.npy", eval(data, {"rows": rows}))
    assert main(["compress", "digits", "in.npy", "-o", "a.bsi", *words.split()]) == code
    err = capsys.readouterr().err
    assert why in err
    assert "fitting the variance" not in err
    assert not Path("a.bsi").exists()


def test_a_prepared_dataset_of_ones_own_is_compressed_without_a_warning(rows, capsys, monkeypatch):
    monkeypatch.setenv("BSI_DATA", "data")
    np.savez("own.npz", train=rows, test=rows[:4])
    assert main(["data", "arrays", "--from", "own.npz", "--bins", "-1", "1", "17"]) == 0
    capsys.readouterr()
    assert main(["compress", "digits", "own", "-o", "a.bsi", "--steps", "2", "--variance", "none", "--no-bound"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_damaged_file_leaves_no_output(rows, capsys):
    np.save("in.npy", rows[:6])
    bsi("compress digits in.npy -o a.bsi --steps 2 --variance none --no-bound", capsys)
    blob = Path("a.bsi").read_bytes()
    network("other", (1, 8, 8), Bins(-1.0, 1.0, 17))
    for damaged, model in ((blob[:-9], "digits"), (blob[:99] + b"x" + blob[100:], "digits"), (blob, "other")):
        Path("b.bsi").write_bytes(damaged)
        assert main(["decompress", "b.bsi", model, "-o", "out.npy"]) != 0
        assert not Path("out.npy").exists()
