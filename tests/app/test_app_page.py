"""`bsi view` in a real browser: a sample is drawn, a step is scrubbed, an image is denoised and one inpainted."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from browser import browser, check_contrast, check_names, needs_chromium, silent_page, state
from bsi.app.workbench import Workbench
from bsi.sampler import Sampler
from test_app import TOKEN, bench_of, serving

__all__ = ["browser"]  # the fixture
pytestmark = needs_chromium


@pytest.fixture(scope="module")
def address(bench: Workbench) -> Iterator[str]:
    with serving(bench) as port:
        yield f"http://127.0.0.1:{port}/{TOKEN}/"


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A page after its first draw."""
    with silent_page(browser, address) as page:
        done(page)
        yield page


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    with opened(browser, address) as page:
        yield page


def done(page: Any) -> None:
    page.wait_for_selector("body[data-state=done]", timeout=60_000)


def values(page: Any, name: str, step: int) -> np.ndarray:
    found = page.evaluate("([name, step]) => window.bsi.values(name, step)", [name, step])
    return np.array(found, np.float32).reshape(-1, 1, 8, 8)


def shown(page: Any, canvas: str) -> str:
    """What a canvas shows, as a fingerprint of its pixels."""
    return page.evaluate("id => document.getElementById(id).toDataURL()", canvas)


def go(page: Any) -> None:
    page.click("#go")
    done(page)


def test_the_view_draws_the_samples_of_the_package(page, bench):
    page.fill("#seed", "5")
    page.evaluate("document.querySelector('#evaluations').value = 9")
    page.select_option("#solver", "sde2")
    go(page)
    ours = list(bench.model.trajectory(range(9), Sampler(8, "sde2"), seed=5))
    assert state(page, "steps") == len(ours)
    for i in (0, 4, 8):
        np.testing.assert_allclose(values(page, "mean", i), ours[i].latent.numpy(), atol=1e-5)
        np.testing.assert_allclose(values(page, "x_hat", i), ours[i].x_hat.numpy(), atol=1e-5)
    assert "9 images, 9 evaluations" in page.inner_text("#status")


def test_the_view_shows_the_steps_and_their_pixels(page):
    last = state(page, "last")
    assert state(page, "position") == last
    drawn = values(page, "x_hat", last)[0, 0]
    expected = np.rint(255 * np.clip((drawn + 1) / 2, 0, 1))
    pixels = page.evaluate(
        """() => { const canvas = document.querySelector("#x_hat"), unit = canvas.width / 3 / 8;
            const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return [[0, 0], [3, 4], [6, 2]].map(([row, column]) =>
                data[4 * (Math.round((row + 0.3) * unit) * width + Math.round((column + 0.3) * unit))]); }"""
    )
    assert pixels == pytest.approx([expected[0, 0], expected[3, 4], expected[6, 2]], abs=1)
    end = shown(page, "mean")
    page.fill("#step", "4")
    assert (state(page, "position"), page.inner_text("#where")) == (4, f"4 of {last}")
    early, precision = shown(page, "mean"), page.inner_text("#precision-now")
    assert early != end
    page.click("#forth")
    assert state(page, "position") == 5
    assert page.inner_text("#precision-now") != precision
    page.click("#back")
    assert shown(page, "mean") == early
    box = page.locator("#timeline").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    assert abs(state(page, "position") - last / 2) <= 0.5
    page.click("#play")
    assert state(page, "playing")
    page.click("#play")
    assert not state(page, "playing")

    page.fill("#step", "12")
    before = shown(page, "curve"), shown(page, "past")
    box = page.locator("#x_hat").bounding_box()
    page.mouse.move(box["x"] + 10, box["y"] + 10)
    assert state(page, "pixel") == {"image": 0, "row": 0, "column": 0}
    assert (shown(page, "curve"), shown(page, "past")) != before
    mean = values(page, "mean", 12)[0, 0, 0, 0]
    assert float(page.inner_text("#pixel-mean").replace("−", "-")) == pytest.approx(mean, abs=0.006)
    assert "row 1, column 1" in page.inner_text("#pixel-note")
    page.mouse.click(box["x"] + 10, box["y"] + 10)  # kept
    page.mouse.move(box["x"] + box["width"] - 10, box["y"] + 10)
    assert state(page, "pixel") == {"image": 0, "row": 0, "column": 0}


def test_the_view_works_with_the_keyboard_alone(page):
    page.keyboard.press("Home")
    assert state(page, "position") == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert state(page, "position") == 1
    page.keyboard.press("End")
    assert state(page, "position") == state(page, "last")
    page.keyboard.press("n")
    done(page)
    assert state(page, "seed") == 1
    page.keyboard.press("3")
    assert state(page, "kind") == "inpaint"
    page.focus("#image")
    hidden = state(page, "hidden")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press(" ")
    changed = [i for i, (a, b) in enumerate(zip(hidden, state(page, "hidden"), strict=True)) if a != b]
    assert changed == [2 * 8 + 4]
    page.focus("#strip")
    image = state(page, "image")
    page.keyboard.press("ArrowRight")
    assert state(page, "image") != image
    page.focus("#mean")
    pixel = state(page, "pixel")
    page.keyboard.press("ArrowDown")
    assert state(page, "pixel")["row"] == pixel["row"] + 1
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    controls = {"seed", "num", "evaluations", "solver", "grid", "go", "step", "play", "mean", "x_hat", "y", "theme"}
    assert controls | {"strip", "image", "adopt"} <= reached


def test_an_image_is_inpainted(page, bench):
    page.click("text=Inpaint")
    page.click("[data-hide=left]")
    box = page.locator("#image").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 15 / 16, box["y"] + box["height"] / 16)  # one pixel more
    hidden = np.array(state(page, "hidden")).reshape(8, 8)
    assert hidden[:, :4].all()
    assert hidden[:, 4:].sum() == hidden[0, 7] == 1
    go(page)
    finished = values(page, "x_hat", state(page, "last"))
    np.testing.assert_allclose(finished[:, 0, hidden == 0], np.tile(bench.images[0, 0][hidden == 0], (9, 1)), atol=1e-6)
    assert finished[:, 0, hidden == 1].std(axis=0).max() > 0.1  # nine images, all different


def test_a_drawn_image_is_denoised(page):
    drawn = values(page, "x_hat", state(page, "last"))[0]
    page.click("text=Denoise")
    assert page.locator("#grid").is_disabled()
    page.click("#adopt")
    page.evaluate("document.querySelector('#precision').value = 1.5")
    go(page)
    np.testing.assert_allclose(np.array(state(page, "image"), np.float32), drawn.ravel(), atol=1e-6)
    guess = values(page, "x_hat", 0)
    np.testing.assert_allclose(guess, np.broadcast_to(guess[:1], guess.shape), atol=1e-5)  # the same start for all
    assert page.inner_text("#precision-value") == page.inner_text("#precision-value").strip() != ""
    assert np.abs(values(page, "x_hat", state(page, "last")) - drawn).mean() < 10**-0.75  # closer than it was measured


def test_a_class_can_be_selected(browser, labeled):
    with serving(labeled) as port, opened(browser, f"http://127.0.0.1:{port}/{TOKEN}/") as page:
        assert page.locator("#label option").all_inner_texts() == ["any", "cat", "dog"]
        assert page.locator("#guidance").is_disabled()
        assert "label" not in state(page, "asked")
        free = values(page, "x_hat", state(page, "last"))
        page.select_option("#label", label="dog")
        done(page)
        assert state(page, "asked")["label"] == 1
        bright = values(page, "x_hat", state(page, "last"))
        page.fill("#guidance", "2.5")
        done(page)
        assert page.inner_text("#guidance-value") == "2.5"
        assert free.mean() < bright.mean()
        cond = torch.ones(9, dtype=torch.long)
        *_, last = labeled.model.trajectory(range(9), guidance=2.5, cond=cond)
        np.testing.assert_allclose(values(page, "x_hat", state(page, "last")), last.x_hat.numpy(), atol=1e-4)
        for width in (420, 800, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.select_option("#label", label="any")
        done(page)
        np.testing.assert_allclose(values(page, "x_hat", state(page, "last")), free, atol=1e-5)


def test_errors_are_shown_as_messages(page):
    page.route("**/run", lambda route: route.fulfill(body='{"error": "the predictions are not finite"}\n'))
    page.click("#go")
    page.wait_for_selector("body[data-state=failed]")
    assert page.inner_text("#status") == "the predictions are not finite"
    page.unroute("**/run")
    page.evaluate("[window.answers, window.fetch] = [window.fetch, () => Promise.reject(new TypeError('Failed'))]")
    page.click("#go")
    page.wait_for_function("document.querySelector('#status').innerText.includes('is `bsi view` still running?')")
    page.evaluate("() => { window.fetch = window.answers; }")
    go(page)
    assert "9 images" in page.inner_text("#status")


def test_nonfinite_predictions_are_shown_as_an_error(browser, bench):
    """A picture of NaN would be black, like a dark sample."""
    with serving(bench_of(float("nan"), bench.model.method, bench)) as port:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{port}/{TOKEN}/")
        page.wait_for_selector("body[data-state=failed]")
        assert "NaN" in page.inner_text("#status")
        assert state(page, "steps") == 0
        page.close()


def test_a_step_is_shown_when_its_measurement_arrives(page):
    """A measurement comes with the step after it; until then the step before is shown, with all three images."""

    def cut(route: Any) -> None:
        lines = route.fetch().text().splitlines()[:5]
        route.fulfill(body="\n".join(lines) + "\n")

    page.route("**/run", cut)
    page.click("#go")
    page.wait_for_selector("body[data-state=failed]")
    assert "ended early" in page.inner_text("#status")
    assert (state(page, "steps"), state(page, "position")) == (5, 3)
    assert values(page, "y", 3).shape == (9, 1, 8, 8)


def test_the_view_is_accessible_at_every_screen_size(page):
    for width in (420, 800, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        for kind in ("draw", "denoise", "inpaint"):
            page.evaluate("kind => document.querySelector(`input[value=${kind}]`).click()", kind)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    check_names(page)
    assert not page.locator("#label").is_visible()  # of a network with labels
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f"html[data-theme={scheme}]")
        check_contrast(page)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
