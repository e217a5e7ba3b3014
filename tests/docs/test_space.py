"""The app of examples/space, without and with Gradio."""

import runpy
from pathlib import Path

import pytest

APP = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "space" / "app.py"))


def test_the_space_draws_samples_and_beliefs() -> None:
    samples, beliefs = APP["draw"](3, 4, 0)
    assert [image.shape for image in samples] == [(64, 64)] * 3
    assert len(beliefs) == 5
    distance = [abs(image.astype(float) - samples[0]).mean() for image in beliefs]
    assert distance[-1] < 5 < distance[0]  # in 8-bit gray levels: the last belief is sharp


def test_the_space_builds_its_page() -> None:
    pytest.importorskip("gradio", reason="pip install gradio")
    assert APP["build"]() is not None
