"""`bsi compress` and `bsi decompress`: the file on disk, what comes back, and clear errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from bsi.cli import main
from bsi.data import open_dataset

pytest.importorskip("constriction")

QUICK = ("--steps", "3", "--variance", "none", "--no-bound")


def compressed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Path, dict]:
    file = folder / "digits.bsi"
    assert main(["compress", "digits", "digits", "--limit", "20", "-o", str(file), "--json", *QUICK, *words]) == 0
    return file, json.loads(capsys.readouterr().out)


def test_the_digits_come_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, record = compressed(tmp_path, capsys)
    assert record["bytes"] == file.stat().st_size
    assert {"net_bits_per_dim", "gross_bits_per_dim", "initial_bits", "png_bits_per_dim"} <= set(record)
    out, preview = tmp_path / "out.npy", tmp_path / "preview.gif"
    assert main(["decompress", str(file), "digits", "-o", str(out), "--preview", str(preview)]) == 0
    assert np.array_equal(np.load(out), open_dataset("digits").test[:20])
    assert preview.exists()


def test_the_bound_is_printed_next_to_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compress", "digits", "digits", "--limit", "20", "--steps", "3", "-o", str(tmp_path / "a.bsi")]
    assert main(words) == 0
    assert "bound:" in capsys.readouterr().out


def test_arrays_and_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array, file, out = tmp_path / "in.npy", tmp_path / "a.bsi", tmp_path / "images"
    rows = np.asarray(open_dataset("digits").test[:20])
    np.save(array, rows)
    assert main(["compress", "digits", str(array), "-o", str(file), *QUICK]) == 0
    assert main(["decompress", str(file), "digits", "-o", str(out)]) == 0
    assert len(list(out.glob("*.png"))) == 20
    rough = tmp_path / "rough.npy"
    capsys.readouterr()
    errors, rates = [], []
    for steps in ("1", "3"):
        words = ["decompress", str(file), "digits", "-o", str(rough), "--lossy-steps", steps, "--json"]
        assert main(words) == 0
        record = json.loads(capsys.readouterr().out)
        errors.append(np.mean(np.load(rough) != rows))
        rates.append(record["rate_bits_per_dim"])
    assert errors[1] < errors[0] < 1
    assert 0 < rates[0] < rates[1]
    assert main(["decompress", str(file), "digits", "-o", str(rough), "--lossy-steps", "4"]) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["compress", "digits", "nothing-here", "-o", "a.bsi", *QUICK], 3, "nothing-here"),
        (["compress", "digits", "floats.npy", "-o", "a.bsi", *QUICK], 3, "integers"),
        (["compress", "digits", "wide.npy", "-o", "a.bsi", *QUICK], 2, "shape"),
        (["compress", "digits", "digits", "-o", "nowhere/a.bsi", *QUICK], 2, "nowhere"),
        (["compress", "digits", "digits", "-o", "a.bsi", "--steps", "0", "--variance", "none"], 2, "steps"),
        (["decompress", "noise.bsi", "digits", "-o", "out.npy"], 3, "bsi compress"),
        (["decompress", "missing.bsi", "digits", "-o", "out.npy"], 3, "missing.bsi"),
    ],
)
def test_errors_are_one_line(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("floats.npy", np.zeros((3, 1, 8, 8)))
    np.save("wide.npy", np.zeros((3, 1, 8, 9), np.uint8))
    Path("noise.bsi").write_bytes(bytes(range(256)))
    assert main(words) == code
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not Path("out.npy").exists()
    assert not Path("a.bsi").exists()
