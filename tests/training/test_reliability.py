"""docs/reliability.md names an existing test in every row; the Slurm script requeues preempted jobs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"


def test_every_row_of_the_fault_table_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.MULTILINE)
    numbers = [int(number) for number, _ in rows]
    assert numbers[:39] == list(range(1, 40))
    assert numbers == sorted(set(numbers))
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    for number, cell in rows:
        named = re.findall(r"`(test_\w+)`", cell)
        assert named, f"row {number} names no test"
        assert set(named) <= known, f"row {number}: {set(named) - known} do not exist"


@pytest.mark.parametrize(("code", "expected", "requeued"), [(75, 0, True), (0, 0, False), (5, 5, False)])
def test_the_slurm_script_requeues_only_preempted_jobs(
    tmp_path: Path, code: int, expected: int, requeued: bool
) -> None:
    """With stand-ins for srun and scontrol that note how they were called."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    notes = {name: tmp_path / f"{name}.called" for name in ("srun", "scontrol")}
    for name, ending in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        body = f'echo "$@" > {notes[name]}; {ending}'
        (tmp_path / name).write_text(f"#!{bash}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "42"}
    ended = subprocess.run([bash, str(SCRIPT), "digits", "--out", "a b"], env=environment, capture_output=True)
    assert ended.returncode == expected, ended.stderr
    assert notes["srun"].read_text().strip() == "--kill-on-bad-exit=1 bsi train digits --out a b"
    assert notes["scontrol"].exists() == requeued
    if requeued:
        assert notes["scontrol"].read_text().strip() == "requeue 42"
