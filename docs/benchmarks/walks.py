"""Count the files of the package that one task enters: a measure of how much a reader has to open.

    python docs/benchmarks/walks.py

A file counts when a function of it is called while the task runs; importing a file does not count.
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import bsi
from bsi import cli, recipes
from bsi.training.step import Engine

PACKAGE = str(Path(bsi.__file__).parent)


def entered(task: Callable[[], object]) -> list[str]:
    """The package's files whose functions are called during the task, in any thread."""
    found: set[str] = set()

    def see(frame, event, argument):  # type: ignore[no-untyped-def]
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add(code.co_filename[len(PACKAGE) + 1 :])

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        task()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(found)


def train_step(folder: Path) -> list[str]:
    """One step of training, the third, on a CPU."""
    steps: list[list[str]] = []
    plain = Engine.step

    def step(engine: Engine, *arguments: object) -> None:
        steps.append(entered(lambda: plain(engine, *arguments)))  # type: ignore[arg-type]

    Engine.step = step  # type: ignore[method-assign,assignment]
    try:
        bsi.train(replace(recipes.digits(), steps=3, batch=16), out=folder / "run")
    finally:
        Engine.step = plain  # type: ignore[method-assign]
    return steps[-1]


def command(*words: str) -> list[str]:
    cli.main([*words])  # the first time imports what it needs
    return entered(lambda: cli.main([*words]))


def view_request() -> list[str]:
    """A request of `bsi view` to draw samples, without the server."""
    from bsi.app.workbench import Request, open_workbench

    bench = open_workbench(Path("digits"), "digits", torch.device("cpu"))
    request = Request(kind="draw", seed=1, num=4, evaluations=8, solver="ode2", grid="edm")
    return entered(lambda: [frame.line() for frame in bench.frames(request)])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        picture = str(folder / "samples.png")
        walks = {
            "training step": train_step(folder),
            "bsi sample": command("sample", "digits", "--num", "4", "--out", picture),
            "bsi eval": command("eval", "digits", "--bpd"),
            "view request": view_request(),
        }
    for task, files in walks.items():
        print(f"{task}: {len(files)} files\n  {' '.join(files)}")
