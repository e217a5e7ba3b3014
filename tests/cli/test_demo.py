"""`bsi demo` trains, evaluates, compares with a histogram, draws, and writes a report."""

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from bsi.cli.demo import Demo


def test_the_demo_leaves_samples_a_report_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Demo(out=tmp_path / "my demo", steps=3, json=True).execute() == 0
    found = json.loads(capsys.readouterr().out)
    assert math.isfinite(found["bits_per_dim"])
    assert found["monte_carlo_error"] > 0
    assert found["baselines"]["histogram"] == pytest.approx(2.44, abs=0.005)
    assert Image.open(found["samples"]).size[0] > 64
    (record,) = (tmp_path / "my demo" / "evaluations").glob("*-bpd-test-*.json")
    assert json.loads(record.read_text())["bits_per_dim"] == found["bits_per_dim"]
    report = Path(found["report"]).read_text()
    assert "<html" in report[:200].lower()
    assert f"<b>{found['bits_per_dim']:.4f}</b>" in report  # the same number everywhere
    assert Demo(out=tmp_path / "my demo", steps=3).execute() == 0
    out, err = capsys.readouterr()
    assert f"{found['bits_per_dim']:.4f}" in out
    assert f"bsi view '{tmp_path}/my demo' · " in err  # as it can be typed
