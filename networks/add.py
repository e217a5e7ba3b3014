"""Put the network of a run into this package, with a model card that is filled from the records of the run.

    python networks/add.py RUN NAME --use "what it is intended for" [--commit HASH] [--note TEXT] [--license MIT]

The weights, a moving average, are rounded to bfloat16; vectors, such as the offsets of norms, stay in float32. The card
lists every evaluation that `bsi eval` stored in the run's folder or in the network's, and says which of the two weights
it is about. Run it again after `bsi eval` of the network's folder to add what the rounded weights achieve.
"""

import argparse
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import bsi
from bsi.errors import UsageError
from bsi.evaluation.runs import weights_hash
from bsi.io import read_json, write_text
from bsi.runtime.export import MODEL_FILE, read_trained, write_model_folder

LARGEST = 60_000_000  # bytes
NETWORKS = Path(__file__).parent / "src" / "bsi_networks"

CARD = """---
library_name: bsi
license: {license}
tags: [generative, {kind}]
---

# {name}

```python
import bsi

model = bsi.Model.from_pretrained("{name}")
samples = model.sample(16)
```

| | |
|---|---|
{rows}

Errors are standard errors; those of bits/dim are of Monte Carlo and of the data set.
"""


def add(run: Path, name: str, use: str, commit: str, note: str, license: str, into: Path) -> Path:
    """Write the folder of the network; returns it."""
    trained, about, folder = read_trained(run), read_json(run / "run.json"), into / name
    weights = {key: each.bfloat16() if each.ndim > 1 else each for key, each in trained.weights.items()}
    write_model_folder(replace(trained, weights=weights), folder)
    size = (folder / MODEL_FILE).stat().st_size
    if size > LARGEST:
        (folder / MODEL_FILE).unlink()
        raise UsageError(f"{name} has {size / 1e6:.0f} MB, more than {LARGEST / 1e6:.0f}. Train a smaller network.")

    data, recipe, environment = trained.data, trained.recipe, about["environment"]
    rounded = weights_hash(bsi.load(folder).denoiser.backbone)
    rows = [
        ("data", f"{data.name}, {data.count:,} training samples of {' x '.join(map(str, data.shape))}, {data.kind}, "
                 f"version {data.version[:12]}"),
        ("method", f"`{recipe.method}`"),
        ("network", f"`{recipe.backbone}`, {sum(each.numel() for each in weights.values()):,} parameters, bfloat16, "
                    f"{size / 1e6:.1f} MB"),
        ("recipe", f"`{recipe.name}`, step {trained.step}; changed: {'; '.join(about['changed']) or 'nothing'}"),
        ("command", f"`{' '.join(about['command'])}`"),
        ("made with", f"{environment['ranks']} x {environment['device']}, bsi {environment['bsi']}, torch "
                      f"{environment['torch']}, commit {commit}"),
        *(evaluated(record, rounded) for record in records(run, folder)),
        ("license", f"{license}, for the weights; the data has its own terms"),
        ("intended use", use),
    ]  # fmt: skip
    if note:
        rows.append(("note", note))
    text = "\n".join(f"| {key} | {value.replace('|', '/')} |" for key, value in rows)
    kind = type(recipe.method).__name__.lower()
    write_text(folder / "README.md", CARD.format(name=name, license=license.lower(), kind=kind, rows=text))
    return folder


def records(*folders: Path) -> Iterator[Mapping[str, Any]]:
    """The stored evaluations of bounds and samples, of each folder in the order in which they were made."""
    for folder in folders:
        for path in sorted(folder.glob("evaluations/*.json")):
            record = read_json(path)
            if "bits_per_dim" in record or "metric" in record:
                yield record


def evaluated(record: Mapping[str, Any], rounded: str) -> tuple[str, str]:
    """A row of the card: what was measured, of which samples and of which weights."""
    of = "these weights" if record["weights_sha256"] == rounded else "the weights before rounding"
    if "bits_per_dim" in record:
        steps = f"{record['finite_k']} steps" if record["finite_k"] else "infinitely many steps"
        found = f"{record['bits_per_dim']:.4f} ± {record['monte_carlo_error']:.4f} ± {record['data_error']:.4f}"
        return "bits/dim", f"{found}, {steps}, {record['images']:,} {record['split']} samples, {of}"
    made, error = record["generation"], record["error"]
    how = f"{made['solver']}, {made['evaluations']} evaluations, guidance {record['drawing']['guidance']:g}"
    found = f"{record['value']:.2f}" + ("" if error is None else f" ± {error:.2f}")
    against = f"{record['n']:,} samples against {record['reference_n']:,} {record['reference_split']} images"
    return record["metric"], f"{found}, {against}, {how}, {of}"


def head() -> str:
    """The commit of this clone."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=NETWORKS, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--use", required=True, help="what the network is intended for")
    parser.add_argument("--commit", default=None, help="the commit that trained it; by default that of this clone")
    parser.add_argument("--note", default="", help="anything else, such as interruptions of the training")
    parser.add_argument("--license", default="MIT")
    parser.add_argument("--into", type=Path, default=NETWORKS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    print(add(given.run, given.name, given.use, given.commit or head(), given.note, given.license, given.into))


if __name__ == "__main__":
    main()
