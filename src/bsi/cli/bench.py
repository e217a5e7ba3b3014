"""`bsi bench`: how fast a network trains, samples and is evaluated on this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from bsi import devices
from bsi.backbones import config, costs
from bsi.cli.options import Count, Device, Json, answer
from bsi.errors import UsageError
from bsi.progress import readable_bytes


@dataclass(frozen=True)
class Bench:
    """Time a network's training step, sampling or bound, and compare with large matrix products.

    Reports the median of repeated measurements after a warm-up. A training step is that of the trainer: noise, loss,
    backward, clipping, AdamW, EMA. Sampling counts images times evaluations.
    """

    work: Annotated[Literal["train", "sample", "elbo"], tyro.conf.Positional]  # What to time.
    backbone: str = "dit-l/2"  # The network, e.g. dit-s/2, dit-mini/2, dit-l/2, unet-128x32, unet-128-256-256x2.
    batch: Count = 128  # Images per batch.
    size: Count = 32  # Height and width of the images, which have three channels.
    precision: devices.Precision = "auto"
    """Precision inside the network; fp8, 8-bit products for the DiT, is experimental."""
    method: Literal["bsi", "bfn", "vdm"] = "bsi"  # The method; all three cost the same.
    lean: bool = False  # Recompute activations in the backward pass: a DiT or U-Net in bfloat16 on an NVIDIA GPU.
    parallel: Literal["ddp", "fsdp"] = "ddp"  # With fsdp, a training step as one rank of FSDP computes it.
    checkpoint: bool = False  # Store only the inputs of blocks, and recompute the blocks: a DiT or a U-Net.
    repeats: Count = 5  # Number of measurements.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        backbone, shape = config.resolve(self.backbone), (3, self.size, self.size)
        if self.checkpoint:
            if not isinstance(backbone, config.DiTConfig | config.UNetConfig):
                raise UsageError(f"--checkpoint is for a DiT or a U-Net, got {self.backbone}. Leave it out.")
            backbone = replace(backbone, checkpoint=True)
        if self.parallel != "ddp" and (self.work != "train" or self.lean or self.precision == "fp8"):
            raise UsageError("--parallel fsdp is for training, without --lean and fp8. Leave it out.")
        costs.cost(backbone, shape, 256)  # raises for an impossible network, before memory is allocated
        import torch

        from bsi.backbones import acceleration
        from bsi.evaluation import speed
        from bsi.runtime.distributed import pick_device
        from bsi.runtime.out_of_memory import LEAST, MOST

        start = speed.Start()
        start.lap("imports")
        device = pick_device(self.device, 0)
        half = devices.compute_dtype(self.precision, device)
        form = acceleration.form_of(backbone, half, device, self.lean)
        if self.lean and form != "lean":
            raise UsageError("--lean needs a DiT or a U-Net in bfloat16 on an NVIDIA GPU: leave --lean out")
        if self.precision == "fp8":
            if self.lean:
                raise UsageError("--precision fp8 already keeps few activations: leave --lean out")
            acceleration.check_fp8(backbone, shape)
        torch.zeros((), device=device).item()  # a GPU sets up its context at first use
        start.lap("device")
        if self.work == "train" and device.type == "cpu":  # the operating system would kill the process
            memory = costs.training_memory(backbone, shape, 256, form=form, half=half is not None)
            needed, free = round(LEAST * (memory.bytes(self.batch) - costs.CONTEXT)), devices.host_memory()
            if needed > free:
                fits = memory.largest(costs.CONTEXT + round(free / MOST))
                raise UsageError(
                    f"not enough memory: a training step with {self.batch} images at a time takes at least "
                    f"{readable_bytes(needed)}, and this process can have {readable_bytes(free)}. "
                    + (f"Use --batch {fits}." if fits else "Not even one fits: use a smaller --backbone.")
                )
        names = ("work", "backbone", "batch", "precision", "lean", "parallel", "checkpoint", "method")
        settings = {name: getattr(self, name) for name in names} | {"shape": shape, "dtype": devices.type_name(half)}
        settings["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        case = speed.Case(
            self.work, backbone, shape, self.batch, self.method, self.precision, self.lean, device, self.parallel
        )
        with devices.enough_for_batch(self.batch, "--batch", device):
            measured = asdict(speed.measure(case, self.repeats, start))
        # JSON has no NaN.
        record = settings | {name: None if value != value else value for name, value in measured.items()}
        return answer(self.json, record, _line(record))


def _line(r: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in r["first_step_parts_s"].items())
    unit = "images × evaluations/s" if r["work"] == "sample" else "images/s"
    memory = "" if r["peak_gib"] is None else f", peak {r['peak_gib']:.1f} GiB"
    return (
        f"{r['work']} {r['backbone']} {r['method']} batch {r['batch']} on {r['device']}: "
        f"{r['images_per_s']:.4g} {unit} ({r['milliseconds']:.1f} ms, spread {100 * r['spread']:.0f} %), "
        f"{r['tflops']:.4g} TFLOP/s = {r['fraction']:.2f} of {r['matmul_tflops']:.4g} in plain products{memory}, "
        f"{'recorded, ' if r['recorded'] else ''}first step after {r['first_step_s']:.1f} s ({parts})"
    )
