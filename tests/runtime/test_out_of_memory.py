"""Running out of memory: an error that names the option that makes the work fit, and how much a host has."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.backbones import Backbone, DiTConfig, resolve
from bsi.backbones.config import CONTEXT, OptimizerKind, training_memory
from bsi.cli import main
from bsi.cli.train import parse
from bsi.errors import UsageError
from bsi.recipe import Evaluation, Every, Recipe
from bsi.runtime.data_spec import DataSpec
from bsi.runtime.distributed import Place, World, watching
from bsi.runtime.out_of_memory import LEAST, MOST, check_host, enough_for_batch, enough_to_train, host_memory
from bsi.values import Bins

GIB = 2**30
SHAPE = (3, 16, 16)


class Hungry(torch.nn.Module):
    """A network for which more than `most` images at a time are too many, from its call number `after` on."""

    def __init__(self, most: int, after: int = 0, when_training: bool = True) -> None:
        super().__init__()
        self.most, self.after, self.when_training = most, after, when_training
        self.calls = 0
        self.scale = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) > self.most and self.calls > self.after and self.training == self.when_training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return self.scale * x


IMAGES = torch.randint(0, 256, (96, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def recipe(**changes: object) -> Recipe:
    every = Every(journal=1, evaluate=4, sample=0, checkpoint=1)
    small = replace(bsi.recipes.digits(), method=bsi.BSI(), backbone=None, steps=4, batch=64, every=every)
    small = replace(small, evaluation=Evaluation(32))
    return replace(small, **changes)


def test_the_answer_to_too_little_memory_is_an_option_that_works(tmp_path):
    """Out of memory in the third step: what the message says to add goes on from there, and ends."""
    out = tmp_path / "run"
    with pytest.raises(UsageError, match="out of memory on cpu") as refused:
        bsi.train(recipe(), data=IMAGES, backbone=Hungry(20, after=2), out=out, device="cpu")
    said = str(refused.value)
    assert refused.value.code == 2
    assert "in step 2 (compute), with 64 samples at a time: --batch 64 on 1 rank, --accumulation 1" in said
    assert '"failed"' in (out / "status.json").read_text()
    while found := re.search(r"add --accumulation (\d+), which computes the same batch of 64", said):
        pieces = int(found[1])
        try:
            bsi.train(recipe(accumulation=pieces), data=IMAGES, backbone=Hungry(20), out=out, device="cpu")
        except UsageError as error:
            said = str(error)
        else:
            break
    assert pieces == 4  # 16 at a time
    assert '"finished"' in (out / "status.json").read_text()


def test_too_little_memory_to_look_at_the_model_names_what_looks(tmp_path):
    hungry = Hungry(2, when_training=False)
    with pytest.raises(UsageError, match=r"after step 4, with 32 test samples at a time .*--evaluation.batch 16"):
        bsi.train(recipe(), data=IMAGES, test=IMAGES, backbone=hungry, out=tmp_path / "run", device="cpu")


def test_a_batch_that_cannot_be_cut_finer_names_a_smaller_one(tmp_path):
    with pytest.raises(
        UsageError, match=r"less than a virtual shard of 4: use --batch 32 --accumulation 16"
    ) as refused:
        bsi.train(recipe(accumulation=16), data=IMAGES, backbone=Hungry(0), out=tmp_path / "run", device="cpu")
    assert "with 4 samples at a time: --batch 64 on 1 rank, --accumulation 16" in str(refused.value)


def test_a_network_of_ours_is_answered_by_the_account_with_exit_code_2(tmp_path, monkeypatch, capsys):
    def full(self, x, t, cond=None):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Backbone, "forward", full)
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--steps", "2", "--device", "cpu"]
    assert main(words) == 2
    assert "fit: add --accumulation" in capsys.readouterr().err


def test_a_batch_of_one_shard_is_answered_with_options_that_the_command_line_knows(tmp_path, monkeypatch, capsys):
    def full(self, x, t, cond=None):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Backbone, "forward", full)
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--virtual-shards", "1", "--device", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    (advice,) = re.findall(r"use (--batch \d+ --accumulation \d+), or (--backbone.checkpoint), which", said)
    smaller, again = (parse(["digits", "--virtual-shards", "1", *option.split()])[0].recipe for option in advice)
    assert smaller.batch < 64
    assert isinstance(again.backbone, DiTConfig)
    assert again.backbone.checkpoint


def test_any_other_work_names_its_own_option():
    device = torch.device("cpu")
    with (
        pytest.raises(UsageError, match=r"with 256 samples at a time\. Use --batch-size 128\."),
        enough_for_batch(256, "--batch-size", device),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(UsageError, match="Not even one fits"), enough_for_batch(1, "--batch-size", device):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(UsageError, match="out of memory on cpu"), enough_for_batch(8, "--batch-size", device):
        torch.empty(1 << 60, dtype=torch.uint8)  # what no host has


def small_steps(name: str) -> tuple[Recipe, int]:
    """A run of two steps with one network, and the bytes that its account says of a step on a CPU."""
    every = Every(journal=1, evaluate=0, sample=0, checkpoint=1)
    config, digits = resolve(name), bsi.recipes.digits()
    account = training_memory(config, SHAPE, 256, form="plain", half=False, optimizer=digits.optimizer.kind)
    return replace(digits, method=bsi.BSI(), backbone=config, steps=2, batch=64, every=every), account.bytes(
        64
    ) - CONTEXT


# VmHWM is this program's own peak; getrusage's ru_maxrss begins with that of the process which started it.
MEASURE = """
import re, sys
from pathlib import Path
import torch
import bsi, bsi.training.train
from test_out_of_memory import SHAPE, small_steps

def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

recipe, _ = small_steps(sys.argv[1])
images = torch.randint(0, 256, (64, *SHAPE), dtype=torch.uint8)
before = peak()
bsi.train(recipe, data=images, out=sys.argv[2], device="cpu")
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process's peak is read from /proc")
@pytest.mark.parametrize("name", ["dit-mini/4", "unet-32x2"])
@pytest.mark.slow
def test_a_step_on_a_cpu_takes_what_the_account_says_within_its_margins(name: str, tmp_path: Path):
    """At least what a run is refused for, at most what it is warned of, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURE, name, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    needed, apart = small_steps(name)[1], 192 * 2**20  # threads, libraries that load on first use
    assert LEAST * needed < int(done.stdout.splitlines()[-1]) < MOST * needed + apart


CIFAR = DataSpec("cifar10", "v", 50000, (3, 32, 32), Bins(-1.0, 1.0, 256))


def has(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("bsi.runtime.out_of_memory.host_memory", lambda sharing=1: round(gib * GIB) // sharing)


def test_a_step_that_the_kernel_would_kill_is_refused_before_it_begins(monkeypatch):
    """CIFAR-10 with DiT-S/2 in batches of 512 on a host of 24 GB; the option that is named fits, without a word."""
    has(monkeypatch, 22)
    cifar, host = bsi.recipes.cifar10_dit_s(), World(Place(), torch.device("cpu"))
    with pytest.raises(UsageError, match=r"not enough memory: .* this process can have 22\.0 GiB") as refused:
        check_host(cifar, CIFAR, host)
    assert refused.value.code == 2
    assert "with 512 samples at a time: --batch 512 on 1 rank, --accumulation 1" in str(refused.value)
    (pieces,) = re.findall(r"add --accumulation (\d+), which computes the same batch of 512", str(refused.value))
    check_host(replace(cifar, accumulation=int(pieces)), CIFAR, host)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gpu_that_is_full_is_answered_by_the_account_of_the_recipes_optimizer(kind: OptimizerKind, monkeypatch):
    """DiT-L/2 on 16 GiB: 31 images at a time with AdamW's moments, 35 with Muon's."""
    monkeypatch.setattr("bsi.runtime.out_of_memory.form_of", lambda config, half, device, lean=False: "fused")
    monkeypatch.setattr("bsi.runtime.out_of_memory.compute_dtype", lambda precision, device: torch.bfloat16)
    monkeypatch.setattr("bsi.runtime.out_of_memory.available", lambda device, sharing=1: 16 * GIB)
    cifar, gpu = bsi.recipes.cifar10_dit_s(), World(Place(), torch.device("cuda"))
    large = replace(cifar, backbone=resolve("dit-l/2"), optimizer=replace(cifar.optimizer, kind=kind))
    with (
        watching(gpu.place, limit_s=600.0) as watchdog,
        pytest.raises(UsageError, match=rf"About {31 if kind == 'adamw' else 35} fit"),
        enough_to_train(large, CIFAR, gpu, watchdog),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_ranks_on_one_host_share_its_memory(monkeypatch):
    has(monkeypatch, 40)
    cifar, cpu = replace(bsi.recipes.cifar10_dit_s(), accumulation=4), torch.device("cpu")
    check_host(cifar, CIFAR, World(Place(local_size=2), cpu))
    with pytest.raises(UsageError, match=r"this process can have 10\.0 GiB"):
        check_host(cifar, CIFAR, World(Place(local_size=4), cpu))


def test_too_little_memory_on_a_cpu_is_exit_code_2_before_the_first_step(tmp_path, monkeypatch, capsys):
    has(monkeypatch, 0.01)
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--steps", "1", "--device", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "not enough memory" in said
    assert len(said.splitlines()) == 1, "what is not trained is not announced"
    assert list(tmp_path.iterdir()) == []


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_host_has_what_is_available_and_what_the_process_holds(tmp_path):
    page = os.sysconf("SC_PAGE_SIZE")
    files(tmp_path, {
        "meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\nSwapFree: 1000 kB\n", "self/statm": "900 300 20\n",
    })  # fmt: skip
    assert host_memory(1, tmp_path, tmp_path / "none") == 5000 * 1024 + 300 * page
    assert host_memory(2, tmp_path, tmp_path / "none") == 2500 * 1024 + 300 * page


def test_a_control_group_above_the_process_limits_it_and_cached_files_do_not_count(tmp_path):
    own = "1:cpu:/\n0::/job/step\n"
    files(tmp_path / "proc", {"meminfo": "MemAvailable: 9000 kB\n", "self/statm": "9 0 2\n", "self/cgroup": own})
    stat = "anon 7\ninactive_file 100000\n"
    files(tmp_path / "cgroup/job", {"memory.max": "700000\n", "memory.current": "500000\n", "memory.stat": stat})
    files(tmp_path / "cgroup/job/step", {"memory.max": "max", "memory.current": "1", "memory.stat": "anon 7\n"})
    assert host_memory(1, tmp_path / "proc", tmp_path / "cgroup") == 300_000


def test_a_system_that_does_not_say_is_taken_to_be_free(tmp_path):
    assert host_memory(1, tmp_path, tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
