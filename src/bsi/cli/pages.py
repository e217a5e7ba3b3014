"""Models in a browser: `bsi view RUN`, a page on this machine, and `bsi report RUN`, one HTML file."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bsi.cli.options import Device, Json, Run, answer
from bsi.errors import extra
from bsi.progress import log


@dataclass(frozen=True)
class View:
    """Open a trained model in the browser: watch a belief sharpen step by step, inspect a pixel, denoise, inpaint.

    The server listens on this machine only, and the printed address contains a random token. From another machine:
    ssh -L PORT:127.0.0.1:PORT HOST, and the same address. Ctrl-C ends it.
    """

    run: Run
    port: int = 0  # The port; 0 chooses a free one.
    browser: bool = True  # With --no-browser the address is printed and no browser is opened.
    device: Device = None
    json: Json = False

    def execute(self) -> int:
        import secrets
        import webbrowser

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
