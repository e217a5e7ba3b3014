"""docs/mixture.html in a real browser: its numbers equal the package's, and it works with mouse and keyboard."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from browser import browser, check_contrast, check_names, needs_chromium, silent_page, state
from bsi import BFN, BSI, VDM
from bsi.grids import GRIDS, named_grid
from bsi.methods import Method
from bsi.oracle import Mixture
from bsi.rng import SeededNoise
from bsi.sampling import measurement, sample, trajectory

__all__ = ["browser"]  # the fixture
pytestmark = needs_chromium

PAGE = Path(__file__).parents[2] / "docs" / "mixture.html"
LAST = 1e4
METHODS: dict[str, Method] = {
    "BSI": BSI(lambda_0=1e-2, alpha_M=LAST),
    "BFN": BFN(sigma_1=(1 + LAST) ** -0.5),
    "VDM": VDM(nu_max=LAST),
}
MEANS, WEIGHTS, STD = [[-1.0, -0.4], [1.0, 0.4], [0.3, -1.1]], [0.5, 0.3, 0.2], 0.15
ORACLE = Mixture.isotropic(torch.tensor(MEANS, dtype=torch.float64), STD, torch.tensor(WEIGHTS, dtype=torch.float64))


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """The page before its first step."""
    with silent_page(browser, PAGE.as_uri()) as page:
        yield page


def numbers(page: Any, method: str, solver: str, grid: str, k: int, num: int, **options: Any) -> list[dict[str, Any]]:
    mixture = {"means": MEANS, "weights": WEIGHTS, "std": STD, "last": LAST}
    asked = {"method": method, "solver": solver, "grid": grid, "k": k, "num": num, **mixture, **options}
    return page.evaluate("asked => window.bsi.trajectory(asked)", asked)


def assert_same(theirs: Any, ours: Tensor, what: str) -> None:
    torch.testing.assert_close(torch.tensor(theirs, dtype=torch.float64), ours, rtol=1e-6, atol=1e-6, msg=what)


@pytest.mark.parametrize("name", list(METHODS))
def test_the_static_page_draws_the_samples_of_the_package(page: Any, name: str) -> None:
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


def test_the_static_page_accepts_given_noise(page: Any) -> None:
    k = 6
    drawn = torch.randn(k + 1, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, method in METHODS.items():
        left, grid = iter(drawn), named_grid("geometric")(method, k)
        predict = ORACLE.predictor(method)
        samples = sample(method, predict, lambda start, end, left=left: next(left), grid, "sde2")
        theirs = numbers(page, name, "sde2", "geometric", k, 3, noise=drawn.tolist())
        assert_same(theirs[-1]["x_hat"], samples, f"samples of {name}")


def test_the_static_page_works_with_the_mouse(page: Any) -> None:
    page.evaluate("go(0)")
    page.click("#forth")
    page.click("#forth")
    assert (state(page, "position"), page.inner_text("#where")) == (2, "step 2 of 40")
    page.click("#back")
    assert state(page, "position") == 1
    page.fill("#step", "12")
    assert state(page, "position") == 12
    first = float(page.inner_text("#open-BSI"))
    page.fill("#step", "40")
    assert float(page.inner_text("#open-BSI")) < first  # the last belief is close to one sample
    page.click("#play")
    assert state(page, "playing")
    page.wait_for_function("window.bsi.state().position > 0.5")
    page.click("#play")
    assert not state(page, "playing")


def test_the_static_page_works_with_the_keyboard_alone(page: Any) -> None:
    for keys, name, expected in (
        (["End"], "position", 40), (["Home", "ArrowRight"], "position", 1), (["2"], "solver", "sde2"),
        (["n"], "seed", 1), (["]"], "followed", 1), (["Space"], "playing", True), (["Space"], "playing", False),
    ):  # fmt: skip
        for key in keys:
            page.keyboard.press(key)
        assert state(page, name) == expected
    reached = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    buttons = {"play", "back", "forth", "mixture"}
    assert buttons | {"step", "solver", "grid", "seed", "k", "num", "std", "lambda"} <= reached


def test_the_static_page_is_accessible(page: Any) -> None:
    page.evaluate("go(12)")
    check_names(page)
    assert "BFN, step 12" in page.get_attribute("#scene-BFN", "aria-label")
    assert "VDM, step 12" in page.inner_text("#status")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        check_contrast(page)
