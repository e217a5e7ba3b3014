"""`bsi bench`: how fast a network trains, samples and measures here."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from bsi.devices import Precision
from bsi.errors import UsageError

if TYPE_CHECKING:
    import torch

    from bsi.backbones.memory import Memory
    from bsi.evaluation.agreement import Agreement
    from bsi.evaluation.speed import Case


@dataclass(frozen=True)
class Bench:
    """Time a network's training step, its evaluations for sampling, or the bound, beside plain matrix products.

    Warms up, repeats, and takes the median; by device events on a GPU, by the wall clock on a CPU. Training is the
    trainer's own step: noise, loss, backward, clipping, AdamW, EMA. Sampling and the bound count images times
    evaluations.
    """

    work: Annotated[Literal["train", "sample", "elbo"], tyro.conf.Positional]
    """what to time"""
    backbone: str = "dit-l/2"
    """its name, e.g. dit-s/2, dit-mini/2, dit-l/2, unet-128x32, unet-128-256-256x2"""
    batch: int = 128
    """images at a time"""
    size: int = 32
    """height and width of the images, which have three channels"""
    precision: Precision = "auto"
    """inside the network; fp8, 8-bit products for the DiT, is experimental"""
    method: Literal["bsi", "bfn", "vdm", "all"] = "bsi"
    """all three cost the same: see for yourself"""
    lean: bool = False
    """keep less for the backward pass, and compute it again: a DiT or U-Net in bfloat16 on an NVIDIA GPU"""
    record: bool = True
    """record a training step and replay it, where that is done: on one GPU"""
    repeats: int = 5
    """how often it is timed"""
    check: bool = False
    """compare with float32, eager, on fresh random inputs first"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where"""
    json: bool = False
    """one JSON object for each method on stdout"""


def run(args: Bench) -> int:
    from bsi.backbones import compute_dtype, cost, resolve
    from bsi.evaluation.start import Start, since_process_start

    start = Start()
    if args.batch < 1 or args.repeats < 1 or args.size < 1:
        raise UsageError(f"batch, repeats and size are at least 1: got {args.batch}, {args.repeats}, {args.size}")
    backbone, shape = resolve(args.backbone), (3, args.size, args.size)
    cost(backbone, shape, 256)  # refuses what cannot be built, before torch allocates anything

    from bsi.backbones.acceleration import check_fp8, form_of
    from bsi.devices import type_name
    from bsi.evaluation.speed import Case, measure
    from bsi.runtime.distributed import pick_device
    from bsi.runtime.out_of_memory import enough_for_batch

    start.lap("imports")
    device = pick_device(None if args.device == "auto" else args.device, 0)
    half = compute_dtype(args.precision, device)
    if args.lean and form_of(backbone, half, device, lean=True) != "lean":
        raise UsageError("lean is a form of a DiT or a U-Net in bfloat16 on an NVIDIA GPU: leave --lean out")
    if args.precision == "fp8" and args.lean:
        raise UsageError("fp8 keeps little already: leave --lean out")
    if args.precision == "fp8":
        check_fp8(backbone, shape)
    _wake(device)
    start.lap("device")
    matmul, code = None, 0
    for method in ("bsi", "bfn", "vdm") if args.method == "all" else (args.method,):
        case = Case(args.work, backbone, shape, args.batch, method, args.precision, args.lean, device, args.record)
        record: dict[str, Any] = {
            "work": args.work, "backbone": args.backbone, "shape": shape, "batch": args.batch, "method": method,
            "precision": args.precision, "dtype": type_name(half), "lean": args.lean, "device": _name(device),
        }  # fmt: skip
        memory = _memory(case)
        _check_host(case, memory)
        if args.check:
            agreement = _check(case)
            start.lap("check")
            record["check"] = asdict(agreement) | {"holds": agreement.holds}
            code = code if agreement.holds else 1
            verdict = "holds" if agreement.holds else "BROKEN"
            print(f"check: output {agreement.output:.1e}, gradient {agreement.gradient:.1e} from float32, tolerance "
                  f"{agreement.tolerance:.0e}: {verdict}", file=sys.stderr)  # fmt: skip
        with enough_for_batch(args.batch, "--batch", device, memory):
            speed = measure(case, args.repeats, matmul, start)
        matmul = speed.matmul_tflops
        record |= asdict(speed)
        print(json.dumps(_known(record), allow_nan=False) if args.json else _line(record), flush=True)
        start = Start(since_process_start())
    return code


def _wake(device: torch.device) -> None:
    """A GPU makes what it needs for this process when it is first used."""
    import torch

    torch.zeros((), device=device).item()


def _known(record: dict[str, Any]) -> dict[str, Any]:
    """What is not known, NaN, as JSON has it."""
    return {
        key: _known(value) if isinstance(value, dict) else None if value != value else value
        for key, value in record.items()
    }


def _memory(case: Case) -> Memory:
    """The account of what is timed, for the case that it does not fit."""
    from bsi.backbones import compute_dtype
    from bsi.backbones.acceleration import form_of
    from bsi.backbones.memory import evaluation_memory, training_memory

    half = compute_dtype(case.precision, case.device)
    if case.work != "train":
        return evaluation_memory(case.backbone, case.shape, 256, half=half is not None)
    form = form_of(case.backbone, half, case.device, case.lean)
    return training_memory(case.backbone, case.shape, 256, form=form, half=half is not None)


def _check_host(case: Case, memory: Memory) -> None:
    """Refuse a training step that a host cannot hold: its kernel would end the process without a word."""
    from bsi.backbones.memory import CONTEXT
    from bsi.progress import readable_bytes
    from bsi.runtime.out_of_memory import LEAST, MOST, available

    needed, there = round(LEAST * (memory.bytes(case.batch) - CONTEXT)), available(case.device)
    if case.work == "train" and case.device.type == "cpu" and needed > there:
        fits = memory.largest(CONTEXT + round(there / MOST))
        raise UsageError(
            f"not enough memory: a training step with {case.batch} images at a time takes at least "
            f"{readable_bytes(needed)}, and this process can have {readable_bytes(there)}. "
            + (f"Use --batch {fits}." if fits else "Not even one fits: use a smaller --backbone.")
        )


def _check(case: Case) -> Agreement:
    import torch

    from bsi.evaluation.agreement import check

    try:
        return check(case)
    except torch.OutOfMemoryError as error:
        raise UsageError(
            "out of memory while checking, which takes the network twice, once in float32: leave --check out, or use a "
            "smaller --backbone"
        ) from error


def _name(device: object) -> str:
    import torch

    return torch.cuda.get_device_name() if str(device).startswith("cuda") else "cpu"


def _line(r: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in r["first_step_parts_s"].items())
    unit = "images × evaluations/s" if r["work"] == "sample" else "images/s"
    memory = f", peak {r['peak_gib']:.1f} GiB" if r["peak_gib"] == r["peak_gib"] else ""
    return (
        f"{r['work']} {r['backbone']} {r['method']} batch {r['batch']} on {r['device']}: "
        f"{r['images_per_s']:.4g} {unit} ({r['milliseconds']:.1f} ms, spread {100 * r['spread']:.0f} %), "
        f"{r['tflops']:.4g} TFLOP/s = {r['fraction']:.2f} of {r['matmul_tflops']:.4g} in plain products{memory}, "
        f"{'recorded, ' if r['recorded'] else ''}first step after {r['first_step_s']:.1f} s ({parts})"
    )
