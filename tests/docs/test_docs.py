"""The documents are correct: Python examples run, commands exist, links resolve, the site builds.

Blocks marked `python` are run, each page in its own namespace; others (`text`, `bash`) are not.
"""

import contextlib
import difflib
import importlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bsi.cli import COMMANDS
from bsi.cli.options import parse
from bsi.errors import UsageError
from bsi.methods import METHODS
from bsi.solvers import SOLVERS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """A page may register solvers and methods; other tests do not see them."""
    kept = [(registry, dict(registry)) for registry in (SOLVERS, METHODS)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [
        "\n".join(line[len(indent) :] for line in text.splitlines()) for indent, kind, text in found if kind == language
    ]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_python_examples_of_the_documents_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        torch.manual_seed(0)
        for i, source in enumerate(blocks(page, "python")):
            exec(compile(source, f"{page.name}, Python block {i + 1}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_of_the_documents_exist(page: Path) -> None:
    """Every word is checked: unknown options and invalid values are rejected."""
    for text in blocks(page, "bash"):
        for line in text.splitlines():
            words = shlex.split(re.sub(r"^(torchrun .* -m (-- )?|python -m |\$ )", "", line), comments=True)
            if words[:1] == ["bsi"] and not words[1].startswith("-"):
                near = difflib.get_close_matches(words[1], COMMANDS)
                assert words[1] in COMMANDS, f"{page.name}: {line!r}, did you mean {near}?"
                try:
                    parsed(*words[1:])
                except (SystemExit, UsageError) as error:
                    pytest.fail(f"{page.name}: {line!r} is rejected: {error}")
            if words[:1] == ["make"]:
                targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert set(words[1:]) <= set(targets), f"{page.name}: {line!r}"


def parsed(name: str, *words: str) -> object:
    """The options of a command, from these words."""
    command = COMMANDS[name]
    module = importlib.import_module(f"bsi.cli.{command.module}")
    if command.options is None:
        return None if "--list" in words else module.parse(words)
    return parse(getattr(module, command.options), words, f"bsi {name}")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_between_the_documents_resolve(page: Path) -> None:
    for target in LINK.findall(re.sub(BLOCK, "", page.read_text(encoding="utf-8"))):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_architecture_page_names_existing_files() -> None:
    (tree,) = [text for text in blocks(ROOT / "docs" / "architecture.md", "text") if text.startswith("src/bsi/")]
    heads = [re.match(r"  ((?:[\w.]+(?:/|\.py)(?:, )?)+)", line) for line in tree.splitlines()]
    shown = {name for head in heads if head for name in head[1].split(", ")}
    assert {"methods/", "model.py", "errors.py", "progress.py"} <= shown
    assert [name for name in sorted(shown) if not (ROOT / "src" / "bsi" / name).exists()] == []


def test_the_api_page_lists_every_public_name_with_its_summary() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    make_api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_api)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == make_api.api(), "docs/api.md is out of date: run `python docs/make_api.py`"
    assert {f"bsi.{name}" for name in ("Model", "BSI", "VDM", "train", "load")} <= set(
        re.findall(r"^\| `([\w.]+)`", page, re.M)
    )


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the site is built with mkdocs")
    pytest.importorskip("mkdocstrings", reason="the site is built with mkdocstrings")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    assert (tmp_path / "mixture.html").read_bytes() == (ROOT / "docs" / "mixture.html").read_bytes()
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert "precision encoding" in pages["reference.html"]
    fetched = {
        url
        for text in pages.values()
        for url in re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', text)
    }
    assert fetched == set()  # pages load nothing from the network
    start = pages["index.html"]
    assert 'id="hljs-light"' in start  # both are needed by the script that switches between light and dark
    assert 'id="hljs-dark"' in start
    assert "templates" not in {path.name for path in tmp_path.iterdir()}
    for page in (ROOT / "docs").rglob("*.md"):  # the menu has every page but the log of experiments
        address = str(page.relative_to(ROOT / "docs").with_suffix(".html"))
        assert (f'href="{address}"' in start) == (page.name != "log.md"), f"mkdocs.yml and {page.name}"
    for path in tmp_path.rglob("*.html"):
        if path.name not in ("404.html", "mixture.html"):
            for target in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', path.read_text(encoding="utf-8")):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
