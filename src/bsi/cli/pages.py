"""Models in a browser: `bsi view RUN`, a page on this machine, and `bsi report RUN`, one HTML file."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bsi.errors import extra
from bsi.progress import log


@dataclass(frozen=True)
class View:
    """Open a trained model in the browser: watch a belief sharpen step by step, inspect a pixel, denoise, inpaint.

    The server listens on this machine only, and the printed address contains a random token. From another machine:
    ssh -L PORT:127.0.0.1:PORT HOST, and the same address. Ctrl-C ends it.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, an exported file, or the name of a bundled network: digits."""
    port: int = 0
    """The port; 0 chooses a free one."""
    browser: bool = True
    """With --no-browser the address is printed and no browser is opened."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Print the address as JSON on stdout."""


def _view(args: View) -> int:
    import secrets
    import webbrowser

    from bsi import pretrained

    with extra("view", "bsi view"):
        from bsi.app.server import create_app, listen, server_of
        from bsi.app.workbench import open_workbench
    from bsi.runtime.distributed import pick_device

    with listen(args.port) as listener:
        bench = open_workbench(pretrained.find(args.run), Path(args.run).name, pick_device(args.device, 0))
        token = secrets.token_urlsafe(24)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        print(json.dumps({"url": address}) if args.json else address, flush=True)
        log("bsi view: Ctrl-C ends it")
        if args.browser and sys.stdout.isatty():
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

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file, by default report.html in the run folder."""
    model: bool = True
    """With --no-model only files are read, and the model is not evaluated."""
    device: Literal["cuda", "cpu"] | None = None
    """By default a GPU if there is one."""
    json: bool = False
    """Print the result as JSON on stdout."""


def _report(args: ReportOptions) -> int:
    from bsi.report import write_report

    path = write_report(args.run, args.out, device=args.device, ask_model=args.model)
    print(json.dumps({"report": str(path), "bytes": path.stat().st_size}) if args.json else path)
    return 0


def run(args: View | ReportOptions) -> int:
    return _view(args) if isinstance(args, View) else _report(args)
