"""Row 31: an out-of-memory error names the option that makes the step fit; on a CPU before the first step."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.backbones import Backbone, resolve
from bsi.backbones.costs import CONTEXT, training_memory
from bsi.cli import main
from bsi.errors import UsageError
from bsi.recipe import Evaluation, Every, Recipe
from bsi.runtime.distributed import Place, World
from bsi.runtime.export import DataSpec
from bsi.runtime.out_of_memory import LEAST, MOST, check_host
from bsi.values import Bins

GIB = 2**30
SHAPE = (3, 16, 16)
IMAGES = torch.randint(0, 256, (96, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
CIFAR = DataSpec("cifar10", "v", 50000, (3, 32, 32), Bins(-1.0, 1.0, 256))


class Hungry(torch.nn.Module):
    """A network that runs out of memory with more than `most` images, from call number `after` on."""

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


def train(out: Path, network: Hungry, **changes: object) -> str:
    """Train for four steps; the message of the error, or an empty text."""
    every = Every(journal=1, evaluate=4, sample=0, checkpoint=1)
    recipe = replace(bsi.recipes.digits(), method=bsi.BSI(), backbone=None, steps=4, batch=64, every=every)
    recipe = replace(recipe, evaluation=Evaluation(32), **changes)
    try:
        bsi.train(recipe, data=IMAGES, test=IMAGES, backbone=network, out=out, device="cpu")
    except UsageError as error:
        return str(error)
    return ""


def test_out_of_memory_suggests_an_option_that_works(tmp_path):
    """Out of memory in the third step: the suggested option resumes the run, and the run ends."""
    out = tmp_path / "run"
    message = train(out, Hungry(20, after=2))
    assert "in step 2 (compute), with 64 samples at a time: batch=64 on 1 rank, accumulation=1" in message
    assert '"failed"' in (out / "status.json").read_text()
    while found := re.search(r"add accumulation=(\d+), which computes the same batch of 64", message):
        pieces = int(found[1])
        message = train(out, Hungry(20), accumulation=pieces)
    assert not message
    assert pieces == 4  # 16 at a time
    assert '"finished"' in (out / "status.json").read_text()


def test_out_of_memory_in_an_evaluation_or_one_shard_suggests_other_options(tmp_path):
    message = train(tmp_path / "a", Hungry(2, when_training=False))
    assert re.search(r"after step 4, with 32 test samples at a time .*evaluation.batch=16", message)
    message = train(tmp_path / "b", Hungry(0), accumulation=16)
    assert "less than a virtual shard of 4: use batch=32 accumulation=16" in message


@pytest.mark.parametrize(
    ("options", "advice"),
    [([], r"fit: add --accumulation \d"), (["--virtual-shards", "1"], r"use --batch \d+ .*, or --backbone.checkpoint")],
)
def test_out_of_memory_of_a_package_network_has_exit_code_2_and_an_estimate(
    options, advice, tmp_path, monkeypatch, capsys
):
    def full(self, x, t, cond=None):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Backbone, "forward", full)
    assert main(["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu", *options]) == 2
    assert re.search(advice, capsys.readouterr().err)


def has(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr("bsi.devices.host_memory", lambda sharing=1: round(gib * GIB) // sharing)


def test_a_step_beyond_the_host_memory_is_rejected_before_it_starts(monkeypatch):
    """CIFAR-10 with DiT-S/2 in batches of 512 on a host of 24 GB; the suggested option fits."""
    has(monkeypatch, 22)
    cifar, host = bsi.recipes.cifar10_dit_s(), World(Place(), torch.device("cpu"))
    with pytest.raises(UsageError, match=r"not enough memory: .* this process can have 22\.0 GiB") as rejected:
        check_host(cifar, CIFAR, host)
    assert "with 512 samples at a time: --batch 512 on 1 rank, --accumulation 1" in str(rejected.value)
    (pieces,) = re.findall(r"add --accumulation (\d+), which computes the same batch of 512", str(rejected.value))
    check_host(replace(cifar, accumulation=int(pieces)), CIFAR, host)
    has(monkeypatch, 40)
    shared = replace(cifar, accumulation=4)
    check_host(shared, CIFAR, World(Place(local_size=2), host.device))
    with pytest.raises(UsageError, match=r"this process can have 10\.0 GiB"):
        check_host(shared, CIFAR, World(Place(local_size=4), host.device))


def test_too_little_host_memory_has_exit_code_2_before_the_first_step(tmp_path, monkeypatch, capsys):
    has(monkeypatch, 0.01)
    words = ["train", "digits", "--out", str(tmp_path / "run"), "--steps", "1", "--device", "cpu"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not enough memory" in line
    assert list(tmp_path.iterdir()) == []


def small_steps(name: str) -> tuple[Recipe, int]:
    """A run of two steps with one network, and the estimated bytes of a step on a CPU."""
    every = Every(journal=1, evaluate=0, sample=0, checkpoint=1)
    config, digits = resolve(name), bsi.recipes.digits()
    account = training_memory(config, SHAPE, 256, form="plain", half=False, optimizer=digits.optimizer.kind)
    recipe = replace(digits, method=bsi.BSI(), backbone=config, steps=2, batch=64, every=every)
    return recipe, account.bytes(64) - CONTEXT


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
def test_a_step_on_a_cpu_takes_the_estimated_memory_within_the_margins(name: str, tmp_path: Path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", MEASURE, name, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    needed, apart = small_steps(name)[1], 192 * 2**20  # threads, libraries that load on first use
    assert LEAST * needed < int(done.stdout.splitlines()[-1]) < MOST * needed + apart
