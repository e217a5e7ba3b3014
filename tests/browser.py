"""Pages in Chromium: they print nothing on the console, load nothing from other hosts, and are accessible."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="pages are tested with playwright")
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="pages are tested in Chromium: apt-get install chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def silent_page(browser: Any, address: str) -> Iterator[Any]:
    """A page that prints nothing on the console and loads nothing from other hosts."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, reduced_motion="reduce", color_scheme="light")
    printed: list[str] = []
    loaded: list[str] = []
    page.on("console", lambda message: printed.append(message.text))
    page.on("pageerror", lambda error: printed.append(str(error)))
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(address)
    yield page
    page.close()
    assert printed == []
    assert all(url.startswith((address, "data:")) for url in loaded)


def state(page: Any, name: str) -> Any:
    return page.evaluate("name => window.bsi.state()[name]", name)


def check_names(page: Any) -> None:
    """Every control has a name for screen readers."""
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas, output")].filter(control => {
            const label = control.labels && control.labels.length ? control.labels[0].textContent : "";
            return !(control.getAttribute("aria-label") || label || control.textContent).trim();
        }).map(control => control.id)"""
    )
    assert nameless == []


def check_contrast(page: Any) -> None:
    """Text and marks have the contrast that the Web Content Accessibility Guidelines ask for."""
    colors = page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
            return Object.fromEntries(["card", "paper", "ink", "soft", "belief", "predict", "measure"].map(
                name => [name, style.getPropertyValue("--" + name).trim()])); }"""
    )

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for ground in ("card", "paper"):
        for name, least in (("ink", 4.5), ("soft", 4.5), ("belief", 3), ("predict", 3), ("measure", 3)):
            low, high = sorted((luminance(colors[name]), luminance(colors[ground])))
            assert (high + 0.05) / (low + 0.05) > least, (name, ground)
