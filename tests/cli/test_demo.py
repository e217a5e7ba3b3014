"""`bsi demo` goes the whole way: it trains, measures beside a histogram, draws, and reports."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsi.cli.demo import Demo, histogram_bits_per_dim, run


def test_the_demo_leaves_samples_a_report_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Demo(out=tmp_path / "my demo", steps=3, json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert math.isfinite(found["bits_per_dim"])
    assert found["monte_carlo_error"] > 0
    assert found["histogram"] == pytest.approx(2.44, abs=0.005)
    assert Image.open(found["samples"]).size[0] > 64
    (record,) = (tmp_path / "my demo" / "evaluations").glob("*-bpd-test-*.json")
    assert json.loads(record.read_text())["bits_per_dim"] == found["bits_per_dim"]
    report = Path(found["report"]).read_text()
    assert "<html" in report[:200].lower()
    assert f"<b>{found['bits_per_dim']:.4f}</b>" in report  # one number, wherever it is told
    assert run(Demo(out=tmp_path / "my demo", steps=3)) == 0
    told = capsys.readouterr()
    assert f"{found['bits_per_dim']:.4f}" in told.out
    assert f"bsi view '{tmp_path}/my demo' · " in told.err  # as it can be typed


def test_a_histogram_knows_each_pixel_and_nothing_else() -> None:
    train = np.zeros((6, 1, 1, 2), np.uint8)
    train[:3, ..., 1] = 1  # the first pixel is always 0, the second 0 or 1 evenly
    test = np.array([[[[0, 1]]]], np.uint8)
    expected = -(math.log2((6 + 1) / (6 + 2)) + math.log2((3 + 1) / (6 + 2))) / 2
    assert histogram_bits_per_dim(train, test, levels=2) == pytest.approx(expected)
