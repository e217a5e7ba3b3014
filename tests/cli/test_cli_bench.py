"""`bsi bench` times training, sampling and the bound; a script compares the fast form with float32."""

import json
import math
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bsi.backbones import DiTConfig, cost, resolve
from bsi.backbones.costs import CONTEXT, training_memory
from bsi.cli.bench import Bench
from bsi.errors import UsageError
from bsi.evaluation.speed import Case, measure, since_process_start
from bsi.runtime.out_of_memory import MOST

SMALL = DiTConfig(width=32, depth=1, heads=2, patch=4)
CPU = torch.device("cpu")
TINY = Bench("elbo", backbone="mlp-8x1", batch=1, size=2, repeats=1, device="cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrix products are not measured."""
    monkeypatch.setattr("bsi.evaluation.speed.measure_matmul", lambda device, precision: 0.5)


def case(work: str, method: str = "bsi", backbone=SMALL) -> Case:
    return Case(work, backbone, (3, 16, 16), 4, method, "float32", False, CPU)


@pytest.mark.parametrize(
    ("work", "method", "evaluations", "passes"),
    [("train", "bsi", 1, 3), ("sample", "bsi", 9, 1), ("sample", "vdm", 8, 1), ("elbo", "bsi", 1, 1)],
)
def test_a_speed_is_the_cost_of_the_work_over_its_time(work, method, evaluations, passes, quick):
    found = measure(case(work, method), repeats=1)
    seconds = found.milliseconds / 1e3
    assert found.images_per_s == pytest.approx(4 * evaluations / seconds)
    flops = cost(SMALL, (3, 16, 16), 256).flops
    assert found.tflops == pytest.approx(passes * 4 * evaluations * flops / seconds / 1e12)
    assert found.fraction == pytest.approx(found.tflops / 0.5)
    assert math.isnan(found.peak_gib)  # a CPU has no peak memory of one process


def test_the_time_to_the_first_step_is_the_sum_of_its_parts(quick):
    before = since_process_start()
    cold = measure(case("train"), repeats=1)
    assert list(cold.first_step_parts_s) == ["imports", "build", "noise", "step"]
    assert before < cold.first_step_s == pytest.approx(sum(cold.first_step_parts_s.values()))
    assert not cold.recorded  # that needs a GPU


def test_bench_suggests_a_batch_that_fits_the_host(monkeypatch):
    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "randint", full)
    with pytest.raises(UsageError, match=r"out of memory on cpu .* with 4096 samples at a time. Use --batch \d+\.$"):
        Bench("train", backbone="dit-mini/8", batch=4096, size=16, device="cpu").execute()


@pytest.mark.parametrize(("gib", "answer"), [(22, r"Use --batch (\d+)\.$"), (1, "Not even one fits")])
def test_a_step_that_exceeds_the_host_memory_is_rejected(gib, answer, monkeypatch):
    """The defaults of `bsi bench train`: DiT-L/2 at 128 images, by autograd in float32."""
    monkeypatch.setattr("bsi.devices.host_memory", lambda sharing=1: gib * 2**30)
    monkeypatch.setattr("bsi.evaluation.speed.measure", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(
        UsageError, match=rf"at least .* GiB, and this process can have {gib}.0 GiB\. {answer}"
    ) as error:
        Bench("train", device="cpu").execute()
    if fits := re.findall(r"--batch (\d+)", str(error.value)):
        memory = training_memory(resolve("dit-l/2"), (3, 32, 32), 256, form="plain", half=False)
        assert MOST * (memory.bytes(int(fits[0])) - CONTEXT) <= gib * 2**30


@pytest.mark.parametrize("backbone", ["dit-mini/4", "unet-16x1"])
def test_the_fast_form_of_a_network_agrees_with_float32(backbone, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "docs" / "benchmarks" / "agreement.py"
    words = [script.name, "--backbone", backbone, "--size", "16", "--batch", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(script), run_name="__main__")
    assert "output 0.0e+00, gradient 0.0e+00" in capsys.readouterr().out  # on a CPU they are the same


def test_the_command_prints_a_record(capsys):
    assert replace(TINY, json=True).execute() == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    names = "work backbone shape batch lean device method tflops matmul_tflops fraction first_step_s"
    assert set(names.split()) <= set(record)
    assert record["images_per_s"] > 0
    assert (record["precision"], record["dtype"], record["peak_gib"]) == ("auto", "float32", None)
    assert next(iter(record["first_step_parts_s"])) == "imports"


def test_the_printed_speed_names_its_unit(quick, capsys):
    for work, unit in (("sample", "images × evaluations/s"), ("elbo", "images/s")):
        assert replace(TINY, work=work).execute() == 0
        assert re.search(rf"on cpu: \S+ {unit} \(\S+ ms, spread \d+ %\), ", capsys.readouterr().out)


def test_the_floor_of_a_unet_counts_all_its_convolutions(monkeypatch, capsys):
    script = Path(__file__).parents[2] / "docs" / "benchmarks" / "unet_floor.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--backbone", "unet-4x2", "--batch", "1", "--runs", "1"])
    runpy.run_path(str(script), run_name="__main__")
    record = json.loads(capsys.readouterr().out)
    # Stem and head; two for each block down, in the middle and up; and the shortcuts of the blocks up.
    assert record["convolutions"] == 2 + 2 * (2 + 2 + 3) + 3
    inner = 7 * 4 * 4 + 4 * 4 * 4 + 3 * 8 * 4  # second ones; first ones down and in the middle; first ones up
    weights = 9 * (21 * 4 + inner + 4 * 3) + 3 * 8 * 4
    assert record["gflop"] == pytest.approx(6 * 32 * 32 * weights / 1e9, abs=1e-6), "forward, and two gradients"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "dit-k/2"}, "dit-[a-z]/2"),
        ({"size": 15}, "patch"),
        ({"backbone": "unet-128x32", "lean": True}, "leave --lean out"),
        ({"backbone": "dit-mini/8", "lean": True}, "leave --lean out"),
        ({"precision": "fp8"}, "fp8 needs a GPU"),
    ],
)
def test_invalid_options_are_rejected_before_a_network_is_built(options, message):
    with pytest.raises(UsageError, match=message):
        Bench("train", device="cpu", **options).execute()
