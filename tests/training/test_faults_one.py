"""Faults of one process: rows 1, 3, 7, 8, 11, 15 to 20, 23, 36, 38 of docs/reliability.md; real processes. A row is a
chain of runs in one folder, most of which are killed. One launcher imports torch and forks a process for each run; the
tests check exit codes and files.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch

from bsi.errors import CorruptCheckpoint, UsageError
from bsi.io import digest_file
from bsi.recipes import digits
from bsi.runtime import checkpoint
from bsi.runtime.export import load
from bsi.training.lock import EXPIRES_S, FILE, hold
from faults.runs import Ended, Entry, fault, fingerprint, latest, metrics, sequence, status

STOPS = (1, 5, 7, 11, 23)  # after steps 7 and 11 a checkpoint and an evaluation are due
PHASES = ("save:write", "save:half", "save:publish", "save:latest", "save:prune")

Chains = dict[str, list[Ended]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one")


@pytest.fixture(scope="module")
def chains(base: Path) -> Chains:
    """Every chain of runs by the name of its folder; the last run of a chain finishes it."""

    def out(name: str, *faults: dict, copy: str = "", words: str = "") -> Entry:
        log = base / f"{name}.log" if name in ("whole", "stopped") else None
        return Entry(base / name, words.split(), list(faults), log=log, copy=base / copy if copy else None)

    plans = {
        "whole": [out("whole")],
        "stopped": [*(out("stopped", fault("step", "signal SIGTERM self", s)) for s in STOPS), out("stopped")],
        "killed": [
            *(out("killed", fault(phase, "kill", 16), copy=f"killed-{phase[5:]}") for phase in PHASES),
            out("killed"),
        ],
        "impatient": [
            out("impatient", fault("step", "signal SIGINT self", 9), fault("save:write", "ctrl-c and wait", 10)),
            out("impatient"),
        ],
        "behind": [out("behind", fault("save:write", "kill two steps later", 16), copy="behind-killed"), out("behind")],
        "full": [
            out("full", fault("save:space", "none left", 16), copy="full-before"),
            out("full", fault("save:half", "no space", 16), copy="full-within"),
            out("full"),
        ],
        "unseen": [
            out("unseen", fault("evaluate", "no disk", 11), copy="unseen-failed"),
            out("unseen", fault("evaluate", "no disk", -1)),
            out("unseen", fault("evaluate", "no memory", -1)),
            out("unseen"),
        ],
        "unwanted": [
            out("unwanted", fault("evaluate", "no disk", 11)),
            out("unwanted", words="--every.evaluate 0 --every.sample 0"),
        ],
        "undrawn": [
            out("undrawn", fault("sample", "no disk", 11), words="--every.sample 12"),
            out("undrawn", words="--every.evaluate 0 --every.sample 0"),
        ],
        "interrupted": [
            out("interrupted", fault("measure", "signal SIGTERM self", 11), copy="interrupted-left"),
            out("interrupted", fault("measure", "signal SIGTERM self", -1)),
            out("interrupted"),
        ],
        "broken": [
            out("broken", fault("save:write", "linger", 16), fault("data", "no disk", 17), copy="broken-failed"),
            out("broken"),
        ],
        "ended": [
            out("ended", fault("step", "signal SIGTERM self", 23), words="--every.evaluate 0"),
            out("ended-killed", fault("save:prune", "kill", 24)),
            out("ended-killed"),
        ],
        "changed": [
            out("changed", fault("step", "signal SIGTERM self", 5)),
            out("changed", words="--optimizer.lr 1e-3 --seed 1"),
            out("changed", words="--backbone.width 32"),
            out("changed", words="--steps 48"),
            out("changed", words="--steps 3"),
            out("changed", words="--allow optimiser.lr"),
            out("changed", words="--keep.last 5 --every.checkpoint 6 --accumulation 2", copy="changed-safe"),
            out("changed"),
        ],
        "constant": [
            out("constant", words="--optimizer.schedule constant --steps 6"),
            out("constant", words="--optimizer.schedule constant --steps 8"),
            out("constant-whole", words="--optimizer.schedule constant --steps 8"),
        ],
        "uneven": [out("uneven", words="--batch 20 --accumulation 3")],
        "nowhere": [Entry(Path("/proc/bsi-run"))],
    }
    ended = iter(sequence(base / "plans", *(entry for plan in plans.values() for entry in plan)))
    return {name: [next(ended) for _ in plan] for name, plan in plans.items()}


def codes(chain: list[Ended]) -> list[int]:
    return [ended.codes[0] for ended in chain]


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = load(a).state_dict(), load(b).state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_stopped_at_any_step_resumes_to_the_same_state_metrics_and_samples(base: Path, chains: Chains) -> None:
    """Rows 1 and 8."""
    assert codes(chains["stopped"]) == [75] * len(STOPS) + [0]
    assert fingerprint(base / "stopped") == fingerprint(base / "whole")
    assert same_weights(base / "stopped", base / "whole")
    assert metrics(base / "stopped") == metrics(base / "whole")
    # No sample is repeated or left out: the concatenated logs are equal.
    assert (base / "stopped.log").read_text() == (base / "whole.log").read_text()


def test_the_previous_checkpoint_loads_after_a_kill_in_any_phase_of_a_save(base: Path, chains: Chains) -> None:
    """Row 3."""
    assert codes(chains["killed"]) == [-9] * len(PHASES) + [0]
    for phase, step in zip(PHASES, (8, 8, 8, 8, 16), strict=True):
        found = checkpoint.find(base / f"killed-{phase[5:]}" / "checkpoints", pytest.fail)
        assert found is not None
        assert found.step == step, phase
    assert list((base / "killed-publish" / "checkpoints").glob(".step-*")), "an incomplete save, to be deleted"
    assert not list((base / "killed" / "checkpoints").glob(".*"))
    assert fingerprint(base / "killed") == fingerprint(base / "whole")
    assert metrics(base / "killed") == metrics(base / "whole")


def test_a_second_ctrl_c_during_a_save_exits_at_once_and_keeps_the_previous_checkpoint(
    base: Path, chains: Chains
) -> None:
    """Row 7."""
    assert codes(chains["impatient"]) == [130, 0]
    assert "second Ctrl-C" in chains["impatient"][0].stderr
    assert "resuming from" in chains["impatient"][1].stderr
    assert "step-00000008" in chains["impatient"][1].stderr
    assert fingerprint(base / "impatient") == fingerprint(base / "whole")


def test_latest_is_updated_only_after_a_background_save_is_durable(base: Path, chains: Chains) -> None:
    """Row 18: killed two steps after the save of step 16 began."""
    assert codes(chains["behind"]) == [-9, 0]
    assert latest(base / "behind-killed") == "step-00000008"
    assert metrics(base / "behind-killed")[-1]["step"] >= 16
    assert fingerprint(base / "behind") == fingerprint(base / "whole")


def test_a_full_disk_keeps_the_previous_checkpoint(base: Path, chains: Chains) -> None:
    """Row 17."""
    assert codes(chains["full"]) == [1, 1, 0]
    for ended in chains["full"][:2]:
        assert "no space for a checkpoint" in ended.stderr
        assert "Traceback" not in ended.stderr
    for copy in ("full-before", "full-within"):
        assert latest(base / copy) == "step-00000008"
        assert checkpoint.find(base / copy / "checkpoints", pytest.fail) is not None
        assert not list((base / copy / "checkpoints").glob(".step-*"))
        assert status(base / copy)["state"] == "failed"
    assert fingerprint(base / "full") == fingerprint(base / "whole")


def test_a_failed_evaluation_loses_no_step_and_is_repeated(base: Path, chains: Chains) -> None:
    """Row 36: it fails after step 12, between the checkpoints of steps 8 and 16, and twice more after a resume."""
    assert codes(chains["unseen"]) == [1, 1, 2, 0]
    assert latest(base / "unseen-failed") == "step-00000012"
    for ended in chains["unseen"][:2]:
        assert "the evaluation or the samples failed at step 12" in ended.stderr
        assert "Set every.evaluate and every.sample to 0" in ended.stderr
        assert "Input/output error" in ended.stderr
    assert (
        "in the evaluation after step 12, with 16 test samples at a time and --samples.count 64"
        in chains["unseen"][2].stderr
    )
    assert fingerprint(base / "unseen") == fingerprint(base / "whole")
    assert metrics(base / "unseen") == metrics(base / "whole")


def test_a_run_resumes_without_the_failed_evaluation(base: Path, chains: Chains) -> None:
    """Row 36: the options that the message names."""
    assert codes(chains["unwanted"]) == [1, 0]
    assert fingerprint(base / "unwanted") == fingerprint(base / "whole")


def test_a_finished_evaluation_is_kept_when_sampling_fails(base: Path, chains: Chains) -> None:
    """Row 36: evaluations that are no longer requested are not repeated."""
    assert codes(chains["undrawn"]) == [1, 0]
    assert "the evaluation or the samples failed at step 12" in chains["undrawn"][0].stderr
    looks = [line for line in metrics(base / "undrawn") if line["event"] != "train"]
    assert looks == [line for line in metrics(base / "whole") if line["event"] == "evaluate" and line["step"] == 12]


def test_a_stop_signal_interrupts_an_evaluation(base: Path, chains: Chains) -> None:
    """Row 38: within the evaluation of step 12, and again when it is repeated."""
    assert codes(chains["interrupted"]) == [75, 75, 0]
    for ended in chains["interrupted"][:2]:
        assert "saved step 12 of 24; the same command or call resumes" in ended.stderr
        assert "failed" not in ended.stderr
    assert latest(base / "interrupted-left") == "step-00000012"
    assert status(base / "interrupted-left")["state"] == "preempted"
    assert not [line for line in metrics(base / "interrupted-left") if line["event"] == "evaluate"]
    assert fingerprint(base / "interrupted") == fingerprint(base / "whole")
    assert metrics(base / "interrupted") == metrics(base / "whole")


def test_a_background_save_is_completed_when_a_step_fails(base: Path, chains: Chains) -> None:
    """Row 18: the run folder stays locked until then, and the last step before the error is saved too."""
    assert codes(chains["broken"]) == [1, 0]
    assert (base / "broken-failed" / "checkpoints" / "step-00000016").is_dir()
    assert latest(base / "broken-failed") == "step-00000017"
    assert not list((base / "broken-failed" / "checkpoints").glob(".*"))
    assert fingerprint(base / "broken") == fingerprint(base / "whole")


def test_a_signal_after_the_last_step_does_not_prevent_the_end_of_a_run(base: Path, chains: Chains) -> None:
    """Stopped in its last step, or killed after the save."""
    assert codes(chains["ended"]) == [0, -9, 0]
    assert status(base / "ended")["state"] == "finished"
    assert "is finished: 24 steps" in chains["ended"][2].stderr
    assert (status(base / "ended-killed")["state"], status(base / "ended-killed")["step"]) == ("finished", 24)


def test_changed_settings_are_listed_and_rejected_unless_safe(base: Path, chains: Chains) -> None:
    """Row 20."""
    assert codes(chains["changed"]) == [75, 2, 2, 2, 2, 2, 0, 0]
    _, rate, network, longer, shorter, typo, safe, finished = (ended.stderr for ended in chains["changed"])
    assert f"optimizer.lr: {digits().optimizer.lr} -> 0.001" in rate
    assert "seed: 0 -> 1" in rate
    assert "--allow optimizer.lr" in rate
    assert len(rate.strip().splitlines()) <= 10
    assert "backbone.width: 16 -> 32" in network
    assert "--init-from" in network
    assert "cosine" in longer
    assert "cannot end before" not in longer
    assert "steps: 24 -> 3" in shorter
    assert "optimizer.lr" in typo
    assert "changed since the run began: keep.last: 2 -> 5" in safe
    assert "is finished: 24 steps" in finished


def test_safe_changes_do_not_change_the_state(base: Path, chains: Chains) -> None:
    """Other intervals, and a kept checkpoint every six steps; other pieces of a batch change only dropout masks."""
    assert codes(chains["changed"])[6] == 0
    kept = {path.name for path in (base / "changed" / "checkpoints").glob("step-*")}
    assert {"step-00000012", "step-00000018", "step-00000024"} <= kept


def test_a_constant_schedule_may_be_extended(base: Path, chains: Chains) -> None:
    assert codes(chains["constant"]) == [0, 0, 0]
    assert "changed since the run began: steps: 6 -> 8" in chains["constant"][1].stderr
    assert fingerprint(base / "constant", 8) == fingerprint(base / "constant-whole", 8)


def test_a_batch_that_cannot_be_divided_is_rejected_before_files_are_created(base: Path, chains: Chains) -> None:
    """Row 11."""
    assert codes(chains["uneven"]) == [2]
    assert "Use 1, 5 accumulation steps" in chains["uneven"][0].stderr
    assert not (base / "uneven").exists()


def test_a_folder_that_cannot_be_written_is_a_clear_error(chains: Chains) -> None:
    """Row 19, the read-only folder."""
    assert codes(chains["nowhere"]) == [2]
    assert "cannot make the run folder /proc/bsi-run" in chains["nowhere"][0].stderr
    assert "Traceback" not in chains["nowhere"][0].stderr


FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, truncate, empty, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_previous_checkpoint_is_used(
    base: Path, chains: Chains, tmp_path: Path, name: str, damage
) -> None:
    """Rows 15 and 16."""
    shutil.copytree(base / "whole" / "checkpoints", tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints" / "step-00000024" / name)
    with pytest.raises(CorruptCheckpoint, match=name):
        checkpoint.verify(tmp_path / "checkpoints" / "step-00000024")
    warnings: list[str] = []
    found = checkpoint.find(tmp_path / "checkpoints", warnings.append)
    assert found is not None
    assert found.step == 16
    assert "DAMAGED CHECKPOINT" in warnings[0]
    assert name in warnings[0]


def test_every_bit_of_a_manifest_is_checked(base: Path, chains: Chains, tmp_path: Path) -> None:
    """Row 15: the manifest is protected by its own hash and its canonical form."""
    folder = tmp_path / "step-00000024"
    shutil.copytree(base / "whole" / "checkpoints" / "step-00000024", folder)
    original = (folder / "manifest.json").read_bytes()
    for bit in range(0, 8 * len(original), 7):
        content = bytearray(original)
        content[bit // 8] ^= 1 << bit % 8
        (folder / "manifest.json").write_bytes(bytes(content))
        with pytest.raises(CorruptCheckpoint):
            checkpoint.verify(folder)


def test_a_wrong_hash_is_shown_with_the_expected_one(base: Path, chains: Chains, tmp_path: Path) -> None:
    folder = tmp_path / "step-00000024"
    shutil.copytree(base / "whole" / "checkpoints" / "step-00000024", folder)
    flip(folder / "ema.safetensors")
    expected = digest_file(base / "whole" / "checkpoints" / folder.name / "ema.safetensors")
    with pytest.raises(CorruptCheckpoint, match=rf"ema.safetensors is damaged: expected .*{expected}, got"):
        checkpoint.verify(folder)


class Canary:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_damaged_runs_foreign_locks_and_malicious_files_in_real_processes(base: Path, chains: Chains) -> None:
    """Rows 15, 16, 19, 20 and 23 from the command line: exit codes and messages."""
    runs = {name: base / f"again-{name}" for name in ("damaged", "ruined", "held", "expired", "older", "malicious")}
    for run in runs.values():
        shutil.copytree(base / "whole", run)
    flip(runs["damaged"] / "checkpoints" / "step-00000024" / "optimizer.safetensors")
    for folder in (runs["ruined"] / "checkpoints").glob("step-*"):
        truncate(folder / "model.safetensors")

    owner = {"host": "elsewhere", "pid": 4711, "started": "1", "job": "99", "token": "t"}
    (runs["expired"] / FILE).write_text(json.dumps(owner))
    long_ago = time.time() - 2 * EXPIRES_S
    os.utime(runs["expired"] / FILE, (long_ago, long_ago))
    foreign = base / "again-foreign"
    shutil.copytree(base / "whole", foreign)
    (foreign / FILE).write_text(json.dumps(owner))

    older = json.loads((runs["older"] / "run.json").read_text())
    (runs["older"] / "run.json").write_text(json.dumps({**older, "format": 0}))

    canary = base / "canary"
    malicious = json.loads((runs["malicious"] / "run.json").read_text())
    malicious["recipe"]["backbone"] = {"kind": "os.system", "command": f"touch {canary}"}
    (runs["malicious"] / "run.json").write_text(json.dumps(malicious))
    for place in ("model.pt", "checkpoints/.metadata", "checkpoints/step-00000024/model.pt"):
        (runs["malicious"] / place).write_bytes(pickle.dumps(Canary(canary)))

    with hold(runs["held"], pytest.fail):
        ended = sequence(base / "plans", *(Entry(run) for run in (*runs.values(), foreign)))
    damaged, ruined, held, expired, old, bad, other = ended

    assert damaged.codes == [0]
    assert "DAMAGED CHECKPOINT" in damaged.stderr
    assert "optimizer.safetensors" in damaged.stderr
    assert "resuming from" in damaged.stderr
    assert "step-00000016" in damaged.stderr
    assert fingerprint(runs["damaged"]) == fingerprint(base / "whole")
    assert ruined.codes == [4]
    assert held.codes == [2]
    assert f"pid {os.getpid()}" in held.stderr
    assert other.codes == [2]
    assert "host elsewhere, pid 4711, job 99" in other.stderr
    assert expired.codes == [0]
    assert "taking over the lock of host elsewhere" in expired.stderr
    assert old.codes == [2]
    assert "format 0" in old.stderr
    assert bad.codes == [2]
    assert "recipe.backbone is of kind dit, unet, mlp, autoencoder: got 'os.system'" in bad.stderr
    assert not canary.exists()


def test_pickles_are_never_loaded(base: Path, tmp_path: Path) -> None:
    """Row 23: neither by name, nor in a run folder, nor as an export."""
    for name in ("model.pt", "model.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
        with pytest.raises(CorruptCheckpoint, match="never loaded"):
            load(tmp_path / name)
    with pytest.raises(CorruptCheckpoint, match="never loaded"):
        load(tmp_path)  # a folder with a model.safetensors, as the hub holds it
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="neither a run folder"):
        load(tmp_path)
    assert not (tmp_path / "canary").exists()
