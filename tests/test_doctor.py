"""`bsi doctor` says what is there, what is missing, and what would fix it."""

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from bsi.cli import doctor, main
from bsi.cli.doctor import Check, examine


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    return tmp_path


def found() -> dict[str, Check]:
    return {check.name: check for check in examine()}


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages were not installed."""
    there = importlib.metadata.version

    def version(name: str) -> str:
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_everything_of_the_core_is_looked_at(empty: Path) -> None:
    checks = found()
    required = {name for name, check in checks.items() if check.required}
    assert required == {"python", "torch", *doctor.CORE}
    assert {"cpu", "cuda", "bf16", "distributed", "triton", "datasets", "inception", "networks"} <= set(checks)
    assert {"matplotlib", "tensorboard", "huggingface_hub"} <= set(checks)
    assert all(check.state == "ok" for check in checks.values() if check.required)


def test_no_other_package_is_named_for_hub_datasets_than_is_asked_for() -> None:
    assert "bsi data" not in doctor.EXTRAS["huggingface_hub"]  # it wants `datasets`, and says so
    assert "dataset" not in doctor.EXTRAS["huggingface_hub"]


def test_required_versions_are_those_of_the_package() -> None:
    declared = {
        part.split(";")[0].strip() for part in importlib.metadata.requires("bsi") or () if "extra ==" not in part
    }
    listed = {f"{name}>={least}" for name, least in doctor.CORE.items()} | {f"torch>={doctor.TORCH}"}
    assert listed == declared


def test_what_is_optional_is_declared_as_an_extra() -> None:
    declared = {
        re.split(r"[^\w.-]", part)[0].replace("-", "_")
        for part in importlib.metadata.requires("bsi") or ()
        if "extra ==" in part
    }
    assert set(doctor.EXTRAS) <= declared


def test_what_is_missing_comes_with_its_fix(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "matplotlib", "tensorboard")
    checks = found()
    assert (checks["matplotlib"].state, checks["matplotlib"].fix) == ("missing", "pip install matplotlib")
    assert (checks["cifar10"].state, checks["cifar10"].fix) == ("missing", "bsi data cifar10")
    assert checks["inception"].state == "missing"
    assert checks["inception"].fix.endswith(f"weights into {empty / 'data'}")


def test_the_exit_code_is_zero_when_the_core_works(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "tensorboard")
    assert main(["doctor"]) == 0
    told = capsys.readouterr()
    assert "– tensorboard" in told.out
    assert "→ pip install tensorboard" in told.out
    assert "\x1b" not in told.out
    assert told.err == "the core works\n"


def test_the_exit_code_is_not_zero_when_it_does_not(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "einops")
    assert main(["doctor", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["healthy"] is False
    (einops,) = [check for check in told["checks"] if check["name"] == "einops"]
    assert einops == {
        "name": "einops", "state": "missing", "found": "not installed", "required": True,
        "fix": "pip install 'einops>=0.8'",
    }  # fmt: skip


def test_an_old_version_is_broken(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.CORE, "rich", "9999")
    assert found()["rich"].state == "broken"


def test_one_failure_hides_nothing_else(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libcudart.so is not there")

    monkeypatch.setattr("torch.cuda.is_available", broken)
    checks = found()
    assert checks["torch"].state == "broken"
    assert "libcudart" in checks["torch"].found
    assert checks["matplotlib"].name == "matplotlib"


def test_a_home_folder_is_not_told(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(empty))
    assert "~/data" in found()["datasets"].found


def test_little_room_is_told(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOMY", 1 << 60)
    assert found()["disk here"].state == "missing"


def test_only_the_home_folder_itself_is_shortened(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/data")  # which the path of the data ends with, too
    assert f"in {empty / 'data'}" in found()["datasets"].found


def test_a_folder_that_nothing_can_be_written_to_is_told(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)  # as on a read-only disk, whoever asks
    assert (found()["disk of data"].state, found()["disk of data"].found) == ("missing", f"{empty} is read-only")
    (empty / "data").write_text("a file in its place")
    assert found()["disk of data"].found == f"{empty / 'data'} is not a folder"
    assert "BSI_DATA" in found()["disk of data"].fix


def test_a_user_without_a_home_is_told(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert found()["datasets"].state == "ok"  # BSI_DATA says where
    monkeypatch.delenv("BSI_DATA")
    assert main(["data", "--list"]) == 2
    assert "set HOME" in capsys.readouterr().err
