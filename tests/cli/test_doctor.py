"""`bsi doctor` reports what is installed, what is missing, and how to fix it."""

import importlib.metadata
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

from bsi.cli import doctor, main
from bsi.cli.doctor import Check, examine


def found() -> dict[str, Check]:
    return {check.name: check for check in examine()}


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """As if these packages were not installed."""
    installed = importlib.metadata.distributions

    def distributions(**given: Any) -> Iterable[importlib.metadata.Distribution]:
        return () if given.get("name") in names else installed(**given)

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


def test_a_missing_extra_comes_with_its_fix(monkeypatch, capsys):
    without(monkeypatch, "matplotlib", "tensorboard")
    checks = found()
    assert {name for name, check in checks.items() if check.required} == {"python", "packages", "torch"}
    assert {"gpu", *doctor.EXTRAS} <= set(checks)
    assert all(check.state == "ok" for check in checks.values() if check.required)
    assert (checks["figures"].state, checks["figures"].fix) == ("missing", "pip install --upgrade 'bsi[figures]'")
    assert main(["doctor"]) == 0
    assert re.search(r"missing  tensorboard .*\n +-> pip install .*'bsi\[tensorboard\]'", capsys.readouterr().out)


def test_a_missing_requirement_is_exit_code_1(monkeypatch, capsys):
    without(monkeypatch, "einops")
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["healthy"] is False
    (packages,) = [check for check in record["checks"] if check["name"] == "packages"]
    assert packages["state"] == "missing"
    assert packages["found"].startswith("einops not installed")
    assert packages["fix"] == "pip install --upgrade 'bsi'"


def test_one_failed_check_does_not_hide_the_others(monkeypatch):
    def broken() -> None:
        raise OSError("libcudart.so is missing")

    monkeypatch.setattr("torch.cuda.is_available", broken)
    checks = found()
    assert (checks["torch"].state, checks["packages"].state) == ("broken", "ok")
    assert "libcudart" in checks["torch"].found


def test_a_user_without_a_home_folder_gets_a_message(monkeypatch, capsys):
    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("BSI_DATA", raising=False)
    assert main(["data", "--list"]) == 2
    assert "HOME" in capsys.readouterr().err
