"""Packages are complete: the wheel holds the page, the digits and their network, and works without a checkout."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the package is built with hatchling")

ROOT = Path(__file__).parents[1]
PAGE = {f"bsi/app/page/{path.name}" for path in (ROOT / "src" / "bsi" / "app" / "page").iterdir()}


def build(source: Path, into: Path, target: str) -> Path:
    """The file of `python -m build` without a new environment, by hatchling, its backend."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    (made,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def run(installed: Path, *words: str) -> str:
    """What `bsi words...` prints, from the wheel's files alone and from a folder that is not the checkout's."""
    env = {**os.environ, "PYTHONPATH": str(installed), "BSI_DATA": str(installed / "data")}
    done = subprocess.run(
        [sys.executable, "-m", "bsi", *words], cwd=installed, env=env, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_the_wheel_holds_the_page_the_digits_and_their_network(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert PAGE
    assert {
        "bsi/app/page/index.html",
        "bsi/data/digits/train.npy",
        "bsi/pretrained/digits.safetensors",
        "bsi/py.typed",
    } <= names
    assert names >= PAGE
    assert "bsi/report/report.css" in names
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
    assert wheel.stat().st_size < 3_000_000


@pytest.mark.slow
def test_the_wheel_works_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    where = subprocess.run(
        [sys.executable, "-c", "import bsi; print(bsi.__file__)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert Path(where.stdout.strip()).is_relative_to(tmp_path)
    assert json.loads(run(tmp_path, "doctor", "--json"))["healthy"]
    drawn = json.loads(run(tmp_path, "sample", "digits", "--num", "4", "--steps", "2", "--out", "d.png", "--json"))
    assert (drawn["num"], (tmp_path / "d.png").is_file()) == (4, True)


def test_the_sdist_builds_the_same_wheel_and_holds_what_the_readme_links_to(wheel: Path, tmp_path: Path) -> None:
    sdist = build(ROOT, tmp_path, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "examples", "tests", "docs/own-data.md", "Makefile"):
        assert (source / name).exists(), name
    again = build(source, tmp_path / "again", "wheel")
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())
