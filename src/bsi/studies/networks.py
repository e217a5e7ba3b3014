"""Train a network of a study, and keep what is needed of it: the moving average, in one small file.

The run folder is the trainer's own, so that training goes on where it was interrupted; `bsi train ... --out` into the
same folder is as good, on as many GPUs as one likes. When it is finished, its average is written to
network.safetensors, rounded to the scale's type, and the checkpoints are removed.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from bsi.io import atomic, share
from bsi.runtime.export import export
from bsi.runtime.run_folder import RunFolder, Sink, Value, read_journal
from bsi.studies.deadline import Deadline
from bsi.studies.job import Train
from bsi.studies.scale import Scale
from bsi.studies.store import Store
from bsi.training.train import train

__all__ = ["train_network", "training_record"]


def train_network(job: Train, scale: Scale, store: Store, deadline: Deadline, device: str | None) -> None:
    """From its first step, or from where it was interrupted, to the file that is kept."""
    run = train(job.network, out=store.network(job.network), sinks=[_stopping(deadline)], device=device)
    exported = export(run, run / "export.safetensors")
    _round(exported, store.weights(job.network), scale)
    exported.unlink()
    shutil.rmtree(RunFolder(run).checkpoints)


def _stopping(deadline: Deadline) -> Sink:
    """A sink that asks the trainer to save and leave, as a scheduler would, when the time is over."""

    def sink(record: Mapping[str, Value]) -> None:
        if deadline.left_s > 0:
            return
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGTERM)
        else:  # where no signal is listened for
            deadline.check("training goes on from its last checkpoint")

    return sink


def _round(exported: Path, kept: Path, scale: Scale) -> None:
    """The exported weights in the type that the scale keeps; the description stays."""
    with safetensors.safe_open(exported, framework="pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[scale.kept]
    with atomic(kept) as temporary:
        safetensors.torch.save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, temporary, metadata)
        share(temporary)


def training_record(job: Train, store: Store) -> dict[str, float]:
    """What the journal says at the end: the last loss and the speed."""
    lines = [line for line in read_journal(store.network(job.network)) if line["event"] == "train"]
    rates = sorted(float(line["images_per_s"]) for line in lines)
    return {"loss": float(lines[-1]["loss"]), "images_per_s": rates[len(rates) // 2]}
