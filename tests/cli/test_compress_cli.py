"""`bsi compress` and `bsi decompress`: the file on disk, and the restored data."""

import json
from pathlib import Path

import numpy as np
import pytest

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
    record = bsi("compress digits digits --limit 20 -o d.bsi --steps 3", capsys)
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
