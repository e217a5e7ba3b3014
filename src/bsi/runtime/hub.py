"""The Hugging Face hub: a folder with an exported model and its description.

    model.safetensors     written by `bsi export`: the weights, with the recipe in the metadata
    recipe.json           the same recipe, for people and search
    README.md             a model card: the method, the data, the command, and how to load it

`bsi.load` opens such a folder like a run. `upload` and `download` call huggingface_hub (extra `hub`); the tests, which
run offline, cover the folder but not the transfers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bsi.errors import extra
from bsi.io import write_json, write_text
from bsi.runtime.export import MODEL_FILE, Trained, export, read_trained
from bsi.runtime.serialization import to_plain

__all__ = ["download", "upload", "write_hub_folder"]

CARD = """---
library_name: bsi
tags: [generative, {kind}]
---

# {name}

{kind_name} trained on {data} ({shape}) for {step} steps with `bsi train {name}`.

```python
import bsi

model = bsi.load("PATH")  # this folder
images = model.sample(16)
```

`recipe.json` has every setting. The weights are {weights}.
"""


def write_hub_folder(run: str | Path, folder: str | Path, ema: bool = True, step: int | None = None) -> Path:
    """Write a folder with the content of a hub repository."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trained = read_trained(Path(run), ema, step)
    export(run, folder / MODEL_FILE, ema, step)
    write_json(folder / "recipe.json", to_plain(trained.recipe))
    write_text(folder / "README.md", _card(trained, ema))
    return folder


def _card(trained: Trained, ema: bool) -> str:
    kind = str(to_plain(trained.recipe)["method"]["kind"])
    return CARD.format(
        name=trained.recipe.name,
        kind=kind,
        kind_name=kind.upper(),
        data=trained.data.name,
        shape=" x ".join(map(str, trained.data.shape)),
        step=trained.step,
        weights="the exponential moving average" if ema else "those of the last step",
    )


def upload(folder: str | Path, repository: str, private: bool = True) -> str:
    """Upload a folder with the token of `hf auth login`; returns its address."""
    api = _hub().HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))


def download(repository: str, revision: str | None = None) -> Path:
    """Download a hub repository; returns the folder, for `bsi.load`."""
    wanted = [MODEL_FILE, "recipe.json", "README.md"]  # no code
    return Path(_hub().snapshot_download(repository, revision=revision, allow_patterns=wanted))


def _hub() -> Any:
    with extra("hub", "the Hugging Face hub"):
        import huggingface_hub  # type: ignore[import-not-found, unused-ignore]
    return huggingface_hub
