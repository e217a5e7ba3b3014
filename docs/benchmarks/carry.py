"""Carry files between machines that exchange only a few small files: a tar in pieces of 15 MiB.

    python docs/benchmarks/carry.py pack PATH ... --to FOLDER           files and folders, bit for bit
    python docs/benchmarks/carry.py pack-run RUN --to FOLDER            an interrupted training, in bfloat16
    python docs/benchmarks/carry.py pack-run RUN --only model --to FOLDER
    python docs/benchmarks/carry.py unpack FOLDER --to FOLDER

Paths in the tar are relative to --root (`pack`), or begin with the name of the run (`pack-run`).

A training state in float32 is too large: weights, average and momenta of a U-Net with 8.9M parameters take 116 MB.
`pack-run` rounds matrices and filters to bfloat16. With `--only model` averages begin again at the weights, and momenta
at 0: for networks whose state does not fit. docs/log.md has what both cost.
"""

import argparse
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bsi.recipe import Keep
from bsi.runtime import checkpoint
from bsi.runtime.checkpoint import Snapshot

PIECE = 15 << 20  # bytes of a file
MOST = 8  # files
TOTAL = 62 << 20  # bytes of all files
ABOUT, CARRIED = "about.json", "carried"


def pack(paths: Sequence[Path], to: Path, root: Path) -> int:
    """Write files and folders as pieces of a tar into `to`; returns their number of bytes."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in paths:
            tar.add(path, arcname=str(path.relative_to(root)))
    data = content.getvalue()
    if len(data) > min(TOTAL, MOST * PIECE):
        raise SystemExit(f"{len(data) >> 20} MiB are too much: pack less, or with pack-run --only model.")
    to.mkdir(parents=True, exist_ok=True)
    for old in to.glob("tar.*"):
        old.unlink()
    for i in range(0, len(data), PIECE):
        (to / f"tar.{i // PIECE:02d}").write_bytes(data[i : i + PIECE])
    return len(data)


def unpack(folder: Path, to: Path) -> list[str]:
    """Write the files of all pieces in `folder` below `to`, and restore carried trainings; returns their names."""
    data = b"".join(piece.read_bytes() for piece in sorted(folder.glob("tar.*")))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        names = tar.getnames()
        tar.extractall(to, filter="data")
    for name in names:
        if Path(name).name == CARRIED:
            _restore(to / name)
    return names


def pack_run(run: Path, to: Path, only: Sequence[str] = ()) -> int:
    """Write the latest checkpoint of a run in bfloat16, all of it or `only` some groups, and the run's small files."""
    found = checkpoint.find(run / "checkpoints", print)
    if found is None:
        raise SystemExit(f"{run} has no checkpoint.")
    groups = [file.stem for file in sorted(found.folder.glob("*.safetensors"))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / run.name / CARRIED
        folder.mkdir(parents=True)
        about = {"step": found.step, "state": dict(found.state), "missing": {}}
        for group in groups:
            tensors = checkpoint.read_tensors(found, group)
            if only and group not in only:
                about["missing"][group] = {name: list(tensor.shape) for name, tensor in tensors.items()}
            else:
                save_file({name: half(tensor) for name, tensor in tensors.items()}, folder / f"{group}.safetensors")
        (folder / ABOUT).write_text(json.dumps(about))
        for file in run.glob("*.json*"):
            if file.name != "lock.json":
                shutil.copy(file, folder.parent)
        return pack([folder.parent], to, Path(temporary))


def half(tensor: Tensor) -> Tensor:
    """Vectors and counters keep their precision: they are small."""
    return tensor.bfloat16() if tensor.ndim > 1 and tensor.dtype == torch.float32 else tensor


def _restore(folder: Path) -> None:
    """Write a carried training as a checkpoint of its run. Missing averages are the weights, missing momenta 0."""
    about = json.loads((folder / ABOUT).read_text())
    tensors = {
        file.stem: {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in load_file(file).items()}
        for file in folder.glob("*.safetensors")
    }
    for group, shapes in about["missing"].items():
        if group == "optimizer":
            tensors[group] = {name: torch.zeros(shape) for name, shape in shapes.items()}
            tensors[group]["counter/scale"] = torch.ones(())
        else:  # an average; a power-function average has the names "WIDTH/NAME"
            known = tensors["ema" if "ema" in tensors else "model"]
            tensors[group] = {name: known[name.rpartition("/")[2]].clone() for name in shapes}
    checkpoint.save(folder.parent / "checkpoints", Snapshot(about["step"], tensors, about["state"]), Keep())
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["pack", "pack-run", "unpack"])
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--root", type=Path, default=Path(), help="of pack: a folder that holds all paths")
    parser.add_argument("--only", nargs="+", default=[], help="groups of pack-run: model, ema, optimizer, powers")
    args = parser.parse_args()
    if args.action == "pack":
        print(f"{pack(args.paths, args.to, args.root)} bytes in {args.to}")
    elif args.action == "pack-run":
        print(f"{pack_run(args.paths[0], args.to, args.only)} bytes in {args.to}")
    else:
        print(f"{len(unpack(args.paths[0], args.to))} files and folders in {args.to}")


if __name__ == "__main__":
    main()
