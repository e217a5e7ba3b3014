"""`bsi view` of text and of binary images, in a real browser: the most probable symbols, and their probabilities."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browser import browser, needs_chromium, state
from bsi import BSI, recipes, train
from bsi.app.workbench import Request, Workbench, open_workbench
from bsi.backbones import MLPConfig
from bsi.data.arrays import Text
from bsi.data.prepare import Preparation, prepare
from bsi.data.published import Binary
from bsi.errors import UsageError
from bsi.recipe import Data
from bsi.sampler import Sampler
from test_app import TOKEN, serving
from test_app_page import go, opened, values

__all__ = ["browser"]  # the fixture

PLAIN = np.array([255, 255, 255])
CERTAIN = np.array([37, 102, 173])


def bench_of(plan: Preparation, folder: Path) -> Workbench:
    """A tiny network, trained for a few steps."""
    prepare(plan, folder / "data")
    small = replace(
        recipes.arrays(), method=BSI(alpha_M=16.0), data=Data(str(folder / "data")), steps=20, batch=16, threads=1
    )
    run = train(replace(small, backbone=MLPConfig(width=16, depth=1)), out=folder / "run", device="cpu")
    return open_workbench(Path(run.path), "tiny", torch.device("cpu"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    folder = tmp_path_factory.mktemp("text")
    (folder / "corpus.txt").write_text("a cab ab\n" * 200)
    return bench_of(Text(folder / "corpus.txt", length=40).plan(), folder)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return bench_of(Binary("digits").plan(), tmp_path_factory.mktemp("binary"))


def probabilities(bench: Workbench, num: int, steps: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(belief, prediction) of each step, of shape (num, K, *space), from Bayes' rule in float64."""
    model, symbols = bench.model, bench.model.symbols
    prior = np.array(symbols.prior)
    found = []
    for step in model.trajectory(range(num), Sampler(steps), seed=seed):
        encoder = model.method.encoder(step.level[None])
        signal, noise = float(encoder.signal), float(encoder.noise)
        latent = step.latent.double().numpy()
        table = model.symbols.values(torch.arange(symbols.count)[:, None], torch.float64).numpy()[:, :, 0]  # e_k
        square = ((latent[:, None] - signal * table[None, :, :, *[None] * (latent.ndim - 2)]) ** 2).sum(2)
        own = prior.reshape(-1, *[1] * (latent.ndim - 2)) * np.exp(
            -0.5 * (square - square.min(1, keepdims=True)) / noise**2
        )
        x_hat = step.x_hat.double().numpy()
        scale = table[0, 0] - table[0, 1]
        found.append((own / own.sum(1, keepdims=True), x_hat / scale + 1 / symbols.count))
    return found


def test_the_probability_of_a_symbol_follows_bayes_rule(text, binary):
    for bench in (text, binary):
        expected = probabilities(bench, 3, 8, seed=5)
        ask = {"kind": "draw", "seed": 5, "num": 3, "evaluations": 9, "solver": "ode2", "grid": "edm"}
        frames = list(bench.frames(Request(**ask)))
        for frame, (own, predicted) in zip(frames, expected, strict=True):
            for found, p in ((frame.mean, own), (frame.x_hat, predicted)):
                if bench is binary:
                    np.testing.assert_allclose(found[:, 0], p[:, 1], atol=1e-4)
                else:
                    chosen = np.take_along_axis(p, found[:, :1].astype(int), axis=1)[:, 0]
                    np.testing.assert_allclose(chosen, p.max(1), atol=1e-4)
                    np.testing.assert_allclose(found[:, 1], p.max(1), atol=1e-4)


def test_symbols_offer_only_sampling(text):
    ask = {"seed": 0, "num": 1, "evaluations": 4, "solver": "sde2", "grid": "edm", "precision": 1.0}
    image = base64.b64encode(bytes(160)).decode()
    with pytest.raises(UsageError, match="draw"):
        text.frames(Request(kind="denoise", image=image, **ask))
    assert json.dumps(text.about["alphabet"], ensure_ascii=False) == '["↵", " ", "a", "b", "c"]'


def pixels(page: Any, *places: tuple[float, float]) -> np.ndarray:
    """The colors of the canvas x_hat at fractions of its width and height."""
    found = page.evaluate(
        """places => { const canvas = document.querySelector("#x_hat"), { width, height } = canvas;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            const at = ([x, y]) => 4 * (Math.floor(y * height) * width + Math.floor(x * width));
            return places.map(place => [...data.slice(at(place), at(place) + 3)]); }""",
        list(places),
    )
    return np.array(found)


@needs_chromium
def test_the_page_shows_text_and_the_color_of_its_probability(browser, text):
    with serving(text) as port, opened(browser, f"http://127.0.0.1:{port}/{TOKEN}/") as page:
        page.fill("#num", "1")
        page.fill("#seed", "3")
        page.evaluate("document.querySelector('#evaluations').value = 9")
        go(page)
        expected = probabilities(text, 1, 8, seed=3)
        for step in (0, 4, 8):
            page.fill("#step", str(step))
            for name, p in zip(("mean", "x_hat"), expected[step], strict=True):
                shown = page.evaluate("([name, step]) => window.bsi.text(name, step, 0)", [name, step])
                assert shown == "".join(text.about["alphabet"][k] for k in p[0].argmax(0))
        most = expected[8][1][0].max(0)
        # of the characters 0 and 33, next to their letters
        corners = pixels(page, (0.05 / 32, 0.05), (1.05 / 32, 0.55))
        np.testing.assert_allclose(corners, np.rint(PLAIN + (CERTAIN - PLAIN) * most[[0, 33], None]), atol=1)
        assert "text of 40 symbols of 5" in page.inner_text("#what")
        assert "1 text, 9 evaluations" in page.inner_text("#status")
        for hidden in ("text=Denoise", "text=Inpaint", "#y", "#curve"):
            assert not page.locator(hidden).first.is_visible()
        box = page.locator("#x_hat").bounding_box()
        page.mouse.move(box["x"] + 2, box["y"] + 2)
        assert page.inner_text("#pixel-x_hat") == f"“{shown[0]}” with {most[0]:.2f}"


@needs_chromium
def test_the_page_shows_binary_images_as_probabilities(browser, binary):
    with serving(binary) as port, opened(browser, f"http://127.0.0.1:{port}/{TOKEN}/") as page:
        drawn = values(page, "x_hat", state(page, "last"))
        (*_, (_, last)) = probabilities(binary, 9, 15, seed=0)
        np.testing.assert_allclose(drawn[:, 0], last[:, 1], atol=1e-4)
        (corner,) = pixels(page, (0.3 / 24, 0.3 / 24))
        np.testing.assert_allclose(corner, np.rint(255 * drawn[0, 0, 0, 0]), atol=1)
        assert not page.locator("text=Inpaint").first.is_visible()
