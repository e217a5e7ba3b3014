"""A trained model as a page on this machine (`bsi view`), an HTML file (`bsi report`), a file (`bsi export`)."""

from __future__ import annotations

import contextlib
import secrets
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bsi.cli.options import Device, Json, RunPath, Within, answer
from bsi.errors import UsageError, extra
from bsi.io import check_writable, make_folder
from bsi.progress import log


@dataclass(frozen=True)
class View:
    """Open a trained model in the browser: watch a belief sharpen step by step, inspect a pixel, denoise, inpaint.

    The server listens on this machine only, and the printed address contains a random token. From another machine:
    ssh -L PORT:127.0.0.1:PORT HOST, and the same address. Ctrl-C ends it.
    """

    run: RunPath
    port: Annotated[int, Within(0, 65535)] = 0  # The port; 0 chooses a free one.
    browser: bool = True  # With --no-browser the address is printed and no browser is opened.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        with extra("view", "bsi view"):
            from bsi.app.server import create_app, listen, server_of
            from bsi.app.workbench import open_workbench
        from bsi.runtime.distributed import pick_device

        with listen(self.port) as listener:
            bench = open_workbench(self.run, self.run.name, pick_device(self.device, 0))
            token = secrets.token_urlsafe(24)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
            answer(self.json, {"url": address}, address)
            sys.stdout.flush()
            log("bsi view: Ctrl-C ends it")
            if self.browser and sys.stdout.isatty():
                webbrowser.open(address)
            with contextlib.suppress(KeyboardInterrupt):
                server_of(create_app(bench, token)).run(sockets=[listener])
        return 0


@dataclass(frozen=True)
class ReportOptions:
    """Write a run and its results as one HTML file: recipe, curves, samples, likelihood, hashes.

    The model is evaluated for a few seconds: a belief that sharpens, its bound on the test set, and how the bits are
    distributed. The file loads nothing when it is opened.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]  # The run folder.
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file, by default report.html in the run folder."""
    model: bool = True  # With --no-model only files are read, and the model is not evaluated.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        from bsi.report import write_report

        path = write_report(self.run, self.out, device=self.device, ask_model=self.model)
        return answer(self.json, {"report": str(path), "bytes": path.stat().st_size}, path)


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file that needs neither the run folder nor the trainer.

    import bsi; model = bsi.load("digits-4000.safetensors"); images = model.sample(16)
    """

    run: RunPath
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
        from bsi.runtime import export

        if self.hub_folder is None:
            if self.upload is not None:
                raise UsageError("--upload needs a folder to upload: give it with --hub-folder")
            if self.out is not None:
                check_writable(self.out, "--out")
            path = export.export(self.run, self.out, not self.weights, self.step, self.sigma_rel)
            return answer(self.json, {"file": str(path), "bytes": path.stat().st_size}, path)
        if self.out is not None or self.sigma_rel is not None:
            raise UsageError("--hub-folder cannot be combined with --out and --sigma-rel: leave them out")
        make_folder(self.hub_folder, "--hub-folder")
        export.write_model_folder(export.read_trained(self.run, not self.weights, self.step), self.hub_folder)
        address = None if self.upload is None else export.upload(self.hub_folder, self.upload)
        record = {"folder": str(self.hub_folder), "address": address}
        return answer(self.json, record, address or self.hub_folder)
