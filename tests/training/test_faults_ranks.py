"""Faults of several ranks: rows 2, 4, 5, 6, 10, 11, 12, 13, 36 and 38 of docs/reliability.md.

torchrun starts the ranks of tests about torchrun; otherwise one launcher forks them. All communicate by gloo.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from faults.runs import (
    Ended,
    Entry,
    fault,
    fingerprint,
    latest,
    metrics,
    samples,
    sequence,
    status,
    torchrun,
    torchrun_killed,
)

Chains = dict[str, list[Ended]]


@pytest.fixture(scope="module", params=["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def layout(request: pytest.FixtureRequest) -> str:
    """How several ranks share the network; a single one has all of it."""
    return str(request.param)


only_ddp = pytest.mark.parametrize("layout", ["ddp"], indirect=True, scope="module")


@pytest.fixture(scope="module")
def base(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"ranks-{layout}")


@pytest.fixture(scope="module")
def chains(layout: str, base: Path) -> Chains:
    """Chains of runs of forked ranks, by the name of their folder."""

    def out(name: str, ranks: int, *faults: dict, words: str = "") -> Entry:
        log = base / f"{name}.log" if name in ("one", "two", "changing") else None
        parallel = f"--parallel {layout if ranks > 1 else 'ddp'} --allow parallel "
        return Entry(base / name, (parallel + words).split(), list(faults), ranks, log)

    stop = [fault("step", "signal SIGTERM self", s) for s in (7, 15)]
    plans = {
        "one": [out("one", 1)],
        "two": [out("two", 2)],
        "changing": [
            out("changing", 2, stop[0]),
            out("changing", 1, stop[1], words="--accumulation 2"),
            out("changing", 2),
        ],
        "audit-1": [out("audit-1", 1, words="--audit")],
        "audit-4": [out("audit-4", 4, words="--audit")],
        "audit-changing": [
            out("audit-changing", 2, stop[0], words="--audit"),
            out("audit-changing", 1, stop[1], words="--audit"),
            out("audit-changing", 2, words="--audit"),
        ],
        "nan": [out("nan", 2, fault("loss", "nan", 13, rank=1)), out("nan", 2)],
        "hang": [out("hang", 2, fault("data", "hang", 9, rank=1), words="--hang-after-s 8")],
        "unseen": [
            out("unseen", 2, fault("measure", "no disk", 11, rank=1)),
            out("unseen", 2, fault("measure", "no memory", -1, rank=1)),
            out("unseen", 2),
        ],
    }
    if layout == "ddp":
        plans |= {
            "full": [out("full", 2, *(fault("network", "no memory", 4, rank=rank) for rank in (0, 1)))],
            "impatient": [
                out(
                    "impatient",
                    2,
                    fault("measure", "no disk", 11, rank=1),
                    fault("save:write", "linger", 12),
                    fault("leave", "kill the first", 11, rank=1),
                ),
                out("impatient", 2),
            ],
            "interrupted": [
                out("interrupted", 2, fault("measure", "signal SIGTERM self", 11, rank=1)),
                out("interrupted", 2),
            ],
            "three": [out("three", 3)],
            "srun": [Entry(base / "srun", ranks=2, slurm=True)],
        }
    ended = iter(sequence(base / "plans", *(entry for plan in plans.values() for entry in plan)))
    return {name: [next(ended) for _ in plan] for name, plan in plans.items()}


def codes(chain: list[Ended]) -> list[list[int]]:
    return [ended.codes for ended in chain]


def test_samples_levels_and_noise_do_not_depend_on_the_number_of_ranks(base: Path, chains: Chains) -> None:
    """Row 10: 2 ranks, then 1, then 2; the one rank computes its batch in the same two pieces."""
    assert codes(chains["changing"]) == [[75, 75], [75], [0, 0]]
    assert samples(base / "changing.log") == samples(base / "two.log") == samples(base / "one.log")
    ours, theirs = metrics(base / "changing"), metrics(base / "two")
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine["bits_per_dim"] == pytest.approx(reference["bits_per_dim"], rel=1e-6)
        # A clipped gradient gives the same update for any scale.
        assert mine.get("grad_norm", 0) == pytest.approx(reference.get("grad_norm", 0), rel=1e-4)


def test_an_audited_run_is_the_same_bits_for_one_two_and_four_ranks(base: Path, chains: Chains) -> None:
    """Row 10, the audit mode."""
    assert codes(chains["audit-changing"]) == [[75, 75], [75], [0, 0]]
    assert codes(chains["audit-4"]) == [[0] * 4]
    reference = fingerprint(base / "audit-1")
    assert fingerprint(base / "audit-4") == reference
    assert fingerprint(base / "audit-changing") == reference
    assert metrics(base / "audit-4") == metrics(base / "audit-changing") == metrics(base / "audit-1")


def test_a_nonfinite_loss_on_one_rank_stops_all_before_the_update(base: Path, chains: Chains) -> None:
    """Row 13: the state before the bad step is saved, and resuming from it gives the run without the fault."""
    assert codes(chains["nan"]) == [[5, 5], [0, 0]]
    assert "the loss or the gradient of step 13 was not finite" in chains["nan"][0].stderr
    replay = json.loads((base / "nan" / "replay-00000013.json").read_text())
    logged = [line.split() for line in samples(base / "two.log")][13 * 16 : 14 * 16]
    assert replay["ids"] == [int(sample) for _, sample, _ in logged]
    assert replay["seed"] == 0
    assert len(replay["t"]) == len(replay["levels"]) == 16
    assert "resuming from" in chains["nan"][1].stderr
    assert "step-00000013" in chains["nan"][1].stderr
    assert fingerprint(base / "nan") == fingerprint(base / "two")
    assert metrics(base / "nan") == metrics(base / "two")


def test_a_rank_that_hangs_is_named_with_its_step(chains: Chains) -> None:
    """Row 12."""
    (ended,) = chains["hang"]
    assert all(code == 1 for code in ended.codes)
    assert "rank 1 hangs in step 9 (data)" in ended.stderr
    assert "rank 0 in step 9 (compute)" in ended.stderr


@only_ddp
def test_ranks_that_run_out_of_memory_exit_with_a_message(chains: Chains) -> None:
    """The error still refers to the objects of the step, such as DDP, when the process group ends."""
    assert codes(chains["full"]) == [[2, 2]], chains["full"][0].stderr
    assert "out of memory on cpu" in chains["full"][0].stderr


def test_a_failed_evaluation_on_another_rank_loses_no_step(base: Path, chains: Chains) -> None:
    """Row 36: the first rank is notified and saves, and the failed rank waits for it. A GPU does not detect a lost peer
    by itself.
    """
    assert codes(chains["unseen"]) == [[1, 1], [1, 2], [0, 0]]
    disk, memory, end = (ended.stderr for ended in chains["unseen"])
    assert "Input/output error" in disk
    assert "in the evaluation after step 12" in memory
    for stderr in (disk, memory):
        assert "the evaluation or the samples failed at step 12" in stderr
        assert "another one has failed" in stderr
        assert "Connection closed" not in stderr
    for stderr in (memory, end):
        assert "resuming from" in stderr
        assert "step-00000012" in stderr
    assert fingerprint(base / "unseen") == fingerprint(base / "two")
    assert metrics(base / "unseen") == metrics(base / "two")


@only_ddp
def test_a_stop_signal_to_one_rank_interrupts_the_evaluation_of_all(base: Path, chains: Chains) -> None:
    """Row 38."""
    assert codes(chains["interrupted"]) == [[75, 75], [0, 0]]
    assert chains["interrupted"][0].stderr.count("saved step 12 of 24; the same command or call resumes") == 2
    assert fingerprint(base / "interrupted") == fingerprint(base / "two")
    assert metrics(base / "interrupted") == metrics(base / "two")


@only_ddp
def test_a_rank_that_failed_in_an_evaluation_exits_after_the_save(base: Path, chains: Chains) -> None:
    """Row 36: launchers kill all ranks when one has exited. This one does so at once."""
    assert codes(chains["impatient"])[1] == [0, 0]
    assert "step-00000012" in chains["impatient"][1].stderr
    assert fingerprint(base / "impatient") == fingerprint(base / "two")


@only_ddp
def test_an_unsuitable_number_of_ranks_is_rejected_with_suitable_ones(base: Path, chains: Chains) -> None:
    """Row 11."""
    assert codes(chains["three"]) == [[2, 2, 2]]
    assert "Use 1, 2, 4, 8" in chains["three"][0].stderr
    assert not (base / "three").exists()


@only_ddp
def test_ranks_of_srun_connect_by_slurms_variables(base: Path, chains: Chains) -> None:
    assert codes(chains["srun"]) == [[0, 0]]
    assert fingerprint(base / "srun") == fingerprint(base / "two")


@only_ddp
@pytest.mark.slow
def test_only_the_first_rank_writes_for_tensorboard(base: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra")
    ended = torchrun(Entry(base / "board", ["--track", "tensorboard"], ranks=2), base / "board-marks")
    assert ended.codes == [0], ended.stderr
    assert len([*(base / "board" / "tensorboard").iterdir()]) == 1


def still_training(run: Path) -> list[str]:
    """Processes whose command names this run folder."""
    words = [path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [b" ".join(line).decode() for line in words if str(run).encode() in line]


def test_a_killed_rank_is_restarted_by_torchrun_to_the_same_state(layout: str, base: Path, chains: Chains) -> None:
    """Row 2: one rank, then the other, in the middle of a step."""
    kills = [fault("loss", "kill", 10, rank=1), fault("loss", "kill", 19, rank=0)]
    ended = torchrun(
        Entry(base / "restarted", ["--parallel", layout], kills, ranks=2), base / "restarted-marks", restarts=2
    )
    assert ended.codes == [0], ended.stderr
    assert len(list((base / "restarted-marks").iterdir())) == 2, "both faults happened"
    assert fingerprint(base / "restarted") == fingerprint(base / "two")
    assert metrics(base / "restarted") == metrics(base / "two")


@pytest.mark.slow
def test_signals_to_the_launcher_or_one_rank_save_the_same_step_on_all(layout: str, base: Path, chains: Chains) -> None:
    """Rows 4, 5 and 6: SIGTERM to torchrun, SIGTERM to a rank, SIGUSR1 to torchrun; then to the end."""
    run = base / "signaled"
    signals = [
        fault("step", "signal SIGTERM parent", 5),
        fault("step", "signal SIGTERM self", 10, rank=1),
        fault("step", "signal SIGUSR1 parent", 15),
    ]
    for i, one in enumerate(signals if layout == "ddp" else signals[:1]):
        ended = torchrun(Entry(run, ["--parallel", layout], [one], ranks=2), base / f"signaled-{i}")
        assert ended.codes != [0]
        assert not still_training(run), ended.stderr
        assert status(run)["state"] == "preempted"
        assert status(run)["step"] == one["step"] + 1, ended.stderr
        assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{one['step'] + 1:08d}"
    ended = torchrun(Entry(run, ["--parallel", layout], ranks=2), base / "signaled-end")
    assert ended.codes == [0], ended.stderr
    assert status(run)["state"] == "finished"
    assert fingerprint(run) == fingerprint(base / "two")
    assert metrics(run) == metrics(base / "two")


@only_ddp
@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_exit(base: Path) -> None:
    """Row 55."""
    out = base / "orphans"
    long = ["--steps", "1000000", "--optimizer.schedule", "constant", "--every.checkpoint", "0", "--every.journal", "1"]
    torchrun_killed(Entry(out, [*long, "--every.evaluate", "0"], ranks=2), base / "orphans-marks")
    end = time.monotonic() + 120
    while still_training(out) and time.monotonic() < end:
        time.sleep(0.2)
    assert not still_training(out)
    assert not (out / "lock.json").exists()
    assert status(out)["state"] == "preempted"
    assert latest(out) == f"step-{status(out)['step']:08d}"
