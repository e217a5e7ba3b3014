"""The small files of a run: its record and its journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bsi.errors import UsageError
from bsi.runtime.run_folder import JsonLines, RunFolder, read_journal


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1, "network": ""}', "{"])
def test_an_invalid_run_record_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(UsageError, match=r"run\.json is not .*Restore it"):
        RunFolder(tmp_path).read_record()


def test_the_journal_is_truncated_to_the_checkpoint(tmp_path: Path) -> None:
    journal = JsonLines(RunFolder(tmp_path), 0)
    for step in (5, 10, 15):
        journal({"event": "train", "step": step, "loss": float("nan") if step == 5 else 1.0})
    with RunFolder(tmp_path).journal.open("a") as file:
        file.write('{"event": "train", "st')
    assert [line["step"] for line in read_journal(tmp_path)] == [5, 10, 15]
    JsonLines(RunFolder(tmp_path), 10)({"event": "train", "step": 11})
    assert [line["step"] for line in read_journal(tmp_path)] == [5, 10, 11]
    assert read_journal(tmp_path)[0]["loss"] is None


def test_a_repeated_evaluation_is_in_the_journal_once(tmp_path: Path) -> None:
    journal = JsonLines(RunFolder(tmp_path), 0)
    for event, step in (("train", 5), ("evaluate", 5), ("train", 10), ("evaluate", 10), ("sample", 10)):
        journal({"event": event, "step": step})
    JsonLines(RunFolder(tmp_path), 10, ("evaluate", "sample"))
    assert [(line["event"], line["step"]) for line in read_journal(tmp_path)] == [
        ("train", 5), ("evaluate", 5), ("train", 10),
    ]  # fmt: skip
