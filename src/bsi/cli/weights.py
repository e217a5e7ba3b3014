"""`bsi export RUN`: the EMA of a run and its recipe as one safetensors file, which `bsi.load` reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bsi.cli.options import Json, Run, answer
from bsi.errors import UsageError
from bsi.io import check_writable, make_folder


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file that needs neither the run folder nor the trainer.

    import bsi; model = bsi.load("digits-4000.safetensors"); images = model.sample(16)
    """

    run: Run
    out: Path | None = None
    """The file, by default RECIPE-STEP.safetensors in the run folder, or in the current one for a bundled network."""
    step: int | None = None  # An earlier checkpoint, by its step.
    weights: bool = False  # Export the weights instead of their moving average.
    sigma_rel: float | None = None
    """Export an average of this relative width, for a run with power-function averages (--ema.powers)."""
    hub_folder: Path | None = None  # Write the folder of a Hugging Face repository instead of one file.
    upload: str | None = None  # Upload that folder to the hub as this repository, USER/NAME, which is private at first.
    json: Json = False

    def execute(self) -> int:
        if self.hub_folder is None:
            if self.upload is not None:
                raise UsageError("--upload needs a folder to upload: give it with --hub-folder")
            if self.out is not None:
                check_writable(self.out, "--out")
            from bsi.runtime.export import export

            path = export(self.run, self.out, not self.weights, self.step, self.sigma_rel)
            return answer(self.json, {"file": str(path), "bytes": path.stat().st_size}, path)
        if self.out is not None or self.sigma_rel is not None:
            raise UsageError("--hub-folder cannot be combined with --out and --sigma-rel: leave them out")
        from bsi.runtime.export import read_trained
        from bsi.runtime.hub import upload, write_model_folder

        make_folder(self.hub_folder, "--hub-folder")
        write_model_folder(read_trained(self.run, not self.weights, self.step), self.hub_folder)
        address = None if self.upload is None else upload(self.hub_folder, self.upload)
        record = {"folder": str(self.hub_folder), "address": address}
        return answer(self.json, record, address or self.hub_folder)
