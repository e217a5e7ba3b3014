"""How ranks find each other, and the rank that the watchdog names."""

from __future__ import annotations

import pytest

from bsi.errors import UsageError
from bsi.runtime.distributed import Place, find_place, first_host, verdict


def test_ranks_are_read_from_torchrun_or_slurm_variables() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "77"}
    assert find_place(torchrun) == Place(3, 8, 1, "a", 77)
    assert find_place({**torchrun, "LOCAL_WORLD_SIZE": "4"}) == Place(3, 8, 1, "a", 77, local_size=4)
    step = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40007",
        "SLURM_STEP_NODELIST": "gpu[003-004]",
    }  # fmt: skip
    assert find_place(step) == Place(5, 8, 1, "gpu003", 20007)
    assert find_place({**step, "SLURM_STEP_NUM_NODES": "3"}) == Place(5, 8, 1, "gpu003", 20007, local_size=3)
    assert find_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == Place(), "sbatch's own shell"
    assert find_place({}) == Place()
    for env, wrong in (
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK .*'x'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK .*'-1'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({**torchrun, "MASTER_PORT": "here"}, "MASTER_PORT .*'here'"),
        ({**step, "SLURM_STEP_NUM_TASKS": "8 x"}, "SLURM_STEP_NUM_TASKS .*'8 x'"),
    ):
        with pytest.raises(UsageError, match=wrong):
            find_place(env)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-006,9],login", "gpu003"), ("a,b", "a"), ("n1", "n1"), ("rack[1,3]-x", "rack1-x"), ("n[7]", "n7")],
)
def test_the_first_host_of_slurms_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_the_watchdog_names_the_slowest_rank() -> None:
    text = verdict(0, {0: (7, "compute"), 1: (7, "data"), 2: (7, "compute")}, 4, 60.0)
    assert "rank 1 hangs in step 7 (data)" in text
    assert "rank 3 never reported" in text
    assert "rank 0 in step 7 (compute)" in text
