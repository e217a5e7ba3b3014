"""The memory of a host and the fastest number of threads, and their use in commands and runs."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.devices import enough_for_batch, host_memory, seconds_by_threads
from bsi.errors import UsageError


def busy(slow: int):
    """Work that takes 20 ms with this number of threads and none with any other, as on a busy machine."""
    return lambda: time.sleep(0.02 if torch.get_num_threads() == slow else 0.0)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_are_compared_and_restored() -> None:
    seconds = seconds_by_threads(busy(3))
    assert list(seconds) == [1, 3]
    assert seconds[3] > 0.02 > seconds[1]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert list(seconds_by_threads(busy(3))) == [1]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("slow", "threads", "said"), [(3, None, True), (1, None, False), (3, 3, False)])
def test_a_run_reports_when_one_thread_is_faster(slow, threads, said, monkeypatch, tmp_path, capfd) -> None:
    """The number of threads is not changed: sums would be rounded differently."""
    plain, work = bsi.backbones.MLPConfig(8, 1), busy(slow)
    recipe = replace(bsi.recipes.digits(), backbone=plain, steps=1, batch=16, threads=threads)

    def network(self, features, t, cond):
        if not self.training:
            work()
        return torch.zeros(len(features), *self.shape) * sum(p.sum() for p in self.parameters())

    monkeypatch.setattr("bsi.backbones.mlp.MLP.network", network)
    quiet = replace(recipe, every=replace(recipe.every, evaluate=0, sample=0))
    bsi.train(quiet, out=tmp_path / "run", device="cpu")
    assert ("Set threads to 1" in capfd.readouterr().err) == said
    assert torch.get_num_threads() == 3


def test_too_little_memory_for_a_batch_names_the_option_of_the_command():
    device = torch.device("cpu")
    with (
        pytest.raises(UsageError, match=r"with 256 samples at a time\. Use --batch-size 128\."),
        enough_for_batch(256, "--batch-size", device),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(UsageError, match="smaller network"), enough_for_batch(1, "--batch-size", device):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(UsageError, match="out of memory on cpu"), enough_for_batch(8, "--batch-size", device):
        torch.empty(1 << 60, dtype=torch.uint8)  # more than any host has


def test_host_memory_is_available_plus_held_memory(tmp_path: Path) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    files(tmp_path, {"meminfo": "MemAvailable: 4000 kB\nSwapFree: 1000 kB\n", "self/statm": "900 300 20\n"})
    assert host_memory(1, tmp_path, tmp_path / "none") == 5000 * 1024 + 300 * page
    assert host_memory(2, tmp_path, tmp_path / "none") == 2500 * 1024 + 300 * page
    nothing = tmp_path / "self"  # as on other systems
    assert host_memory(1, nothing, nothing) == os.sysconf("SC_PHYS_PAGES") * page


def test_control_groups_limit_memory_and_cached_files_do_not_count(tmp_path: Path) -> None:
    own = "1:cpu:/\n0::/job/step\n"
    files(tmp_path / "proc", {"meminfo": "MemAvailable: 9000 kB\n", "self/statm": "9 0 2\n", "self/cgroup": own})
    stat = "anon 7\ninactive_file 100000\n"
    files(tmp_path / "cgroup/job", {"memory.max": "700000\n", "memory.current": "500000\n", "memory.stat": stat})
    files(tmp_path / "cgroup/job/step", {"memory.max": "max", "memory.current": "1", "memory.stat": "anon 7\n"})
    assert host_memory(1, tmp_path / "proc", tmp_path / "cgroup") == 300_000


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
