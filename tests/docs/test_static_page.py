"""docs/mixture.html in a real browser: its numbers are the package's, and it works by mouse and by keyboard."""

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bsi import BFN, BSI, VDM
from bsi.grids import GRIDS, named_grid
from bsi.methods import Method
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampling import measurement, sample, trajectory

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested with playwright: pip install playwright"
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="the page is tested in Chromium: apt-get install chromium")

PAGE = Path(__file__).parents[2] / "docs" / "mixture.html"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
LAST = 1e4
METHODS: dict[str, Method] = {
    "BSI": BSI(lambda_0=1e-2, alpha_M=LAST),
    "BFN": BFN(sigma_1=(1 + LAST) ** -0.5),
    "VDM": VDM(nu_max=LAST),
}
MEANS, WEIGHTS, STD = [[-1.0, -0.4], [1.0, 0.4], [0.3, -1.1]], [0.5, 0.3, 0.2], 0.15
ORACLE = Mixture.isotropic(torch.tensor(MEANS, dtype=torch.float64), STD, torch.tensor(WEIGHTS, dtype=torch.float64))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, "--disable-sync", "--no-first-run"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page at rest, before its first step; it must print nothing on the console and fetch nothing else."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, reduced_motion="reduce", color_scheme="light")
    printed: list[str] = []
    fetched: list[str] = []
    page.on("console", lambda message: printed.append(message.text))
    page.on("pageerror", lambda error: printed.append(str(error)))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(PAGE.as_uri())
    yield page
    page.close()
    assert printed == []
    assert [url for url in fetched if not url.startswith("data:")] == [PAGE.as_uri()]


def numbers(page: Any, method: str, solver: str, grid: str, k: int, num: int, **options: Any) -> list[dict[str, Any]]:
    mixture = {"means": MEANS, "weights": WEIGHTS, "std": STD, "last": LAST}
    asked = {"method": method, "solver": solver, "grid": grid, "k": k, "num": num, **mixture, **options}
    return page.evaluate("asked => window.bsi.trajectory(asked)", asked)


def assert_same(theirs: Any, ours: Tensor, what: str) -> None:
    torch.testing.assert_close(torch.tensor(theirs, dtype=torch.float64), ours, rtol=1e-6, atol=1e-6, msg=what)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_page_draws_the_samples_of_the_package(page: Any, name: str) -> None:
    method, k, num, seed = METHODS[name], 11, 5, 7
    for grid, solver in product(GRIDS, ("posterior", "sde2", "ode2")):
        noise = SeededNoise(seed, torch.arange(num), (2,), torch.float64)
        ours = list(trajectory(method, ORACLE.predictor(method), noise, named_grid(grid)(method, k), solver))
        theirs = numbers(page, name, solver, grid, k, num, seed=seed)
        assert len(theirs) == len(ours) == k + 1
        for i, (there, here) in enumerate(zip(theirs, ours, strict=True)):
            what = f"{name} {solver} {grid}, step {i}"
            assert there["level"] == pytest.approx(float(here.level), rel=1e-9), what
            assert_same(there["latent"], here.latent, f"latent of {what}")
            assert_same(there["x_hat"], here.x_hat, f"x_hat of {what}")
            if i < k:
                assert_same(there["y"], measurement(method, here, ours[i + 1]), f"y of {what}")


def test_the_page_takes_given_noise(page: Any) -> None:
    k = 6
    drawn = torch.randn(k + 1, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, method in METHODS.items():
        left, grid = iter(drawn), named_grid("geometric")(method, k)
        predict = ORACLE.predictor(method)
        samples = sample(method, predict, lambda start, end, left=left: next(left), grid, "sde2")
        theirs = numbers(page, name, "sde2", "geometric", k, 3, noise=drawn.tolist())
        assert_same(theirs[-1]["x_hat"], samples, f"samples of {name}")


def test_the_page_works_with_the_mouse(page: Any) -> None:
    position = lambda: page.evaluate("window.bsi.state().position")  # noqa: E731
    page.evaluate("go(0)")
    page.click("#forth")
    page.click("#forth")
    assert (position(), page.inner_text("#where")) == (2, "step 2 of 40")
    page.click("#back")
    assert position() == 1
    page.fill("#step", "12")
    assert position() == 12
    first = float(page.inner_text("#open-BSI"))
    page.fill("#step", "40")
    assert float(page.inner_text("#open-BSI")) < first  # by the end the sample is decided
    page.click("#play")
    assert page.evaluate("window.bsi.state().playing")
    page.wait_for_function("window.bsi.state().position > 0.5")
    page.click("#play")
    assert not page.evaluate("window.bsi.state().playing")


def test_the_page_works_with_the_keyboard_alone(page: Any) -> None:
    state = lambda name: page.evaluate(f"window.bsi.state().{name}")  # noqa: E731
    page.keyboard.press("End")
    assert state("position") == 40
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert state("position") == 1
    page.keyboard.press("2")
    assert state("solver") == "sde2"
    page.keyboard.press("n")
    assert state("seed") == 1
    page.keyboard.press("]")
    assert state("followed") == 1
    page.keyboard.press("Space")
    assert state("playing")
    page.keyboard.press("Space")
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    buttons, fields = (
        {"play", "back", "forth", "mixture"},
        {"step", "solver", "grid", "seed", "k", "num", "std", "lambda"},
    )
    assert buttons | fields <= reached


def test_every_control_has_a_name_for_screen_readers(page: Any) -> None:
    page.evaluate("go(12)")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, output")].filter(control => {
            const label = control.labels && control.labels.length ? control.labels[0].textContent : "";
            return !(control.getAttribute("aria-label") || label || control.textContent).trim();
        }).map(control => control.id)"""
    )
    assert nameless == []
    assert "BFN, step 12" in page.get_attribute("#scene-BFN", "aria-label")
    assert "VDM, step 12" in page.inner_text("#status")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_in_light_and_dark(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    colors = page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(["card", "paper", "ink", "soft", "belief", "predict", "measure"].map(
                name => [name, style.getPropertyValue("--" + name).trim()])); }"""
    )

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(colors[a]), luminance(colors[b])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ground in ("card", "paper"):
        assert min(contrast(ink, ground) for ink in ("ink", "soft")) > 4.5  # text
        assert min(contrast(mark, ground) for mark in ("belief", "predict", "measure")) > 3  # marks
