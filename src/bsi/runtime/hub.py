"""A model as a folder, which the Hugging Face hub can hold.

    model.safetensors     an export: the weights, with the description of the model in the metadata
    config.json           the same description, for people and search
    README.md             a model card: the method, the data, and how to load it

`bsi.load` opens such a folder like a run. `upload` and `download` call huggingface_hub (extra `hub`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bsi.errors import UsageError, extra
from bsi.io import make_folder, write_json, write_text
from bsi.recipe import Recipe
from bsi.runtime.export import MODEL_FILE, Trained, write_export
from bsi.runtime.serialization import to_plain

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)

CARD = """---
library_name: bsi
tags: [generative, {kind}]
---

# {name}

{kind_name} for data of shape {shape}{training}.

```python
import bsi

model = bsi.Model.from_pretrained("PATH"{backbone})  # this folder, or the name of this repository
samples = model.sample(16)
```

`config.json` describes the model. The weights are {weights}.
"""


def write_model_folder(trained: Trained, folder: Path) -> Path:
    """Write a model as a folder with the content of a hub repository."""
    make_folder(folder, "the folder")
    write_export(folder / MODEL_FILE, trained)
    write_json(folder / "config.json", trained.about())
    write_text(folder / "README.md", _card(trained))
    return folder


def _card(trained: Trained) -> str:
    name, training = trained.recipe.name, ""
    kind = to_plain(trained.recipe.method)["kind"]
    if isinstance(trained.recipe, Recipe):
        data = trained.data.name or "your data"
        training = f", trained on {data} with `bsi train {name}`, step {trained.step}"
    return CARD.format(
        name=name,
        kind=kind,
        kind_name=kind.upper(),
        shape=" x ".join(map(str, trained.data.shape)),
        training=training,
        backbone="" if trained.recipe.backbone else f", backbone={trained.network.rpartition('.')[2]}(...)",
        weights="an exponential moving average" if trained.ema else "those that the model had",
    )


def is_repository(source: str | Path) -> bool:
    """Whether this is the name of a repository, USER/NAME, rather than a path in a folder that exists here."""
    return REPOSITORY.fullmatch(str(source)) is not None and not Path(source).parent.exists()


def upload(folder: str | Path, repository: str, private: bool = True) -> str:
    """Upload a folder with the token of `hf auth login`; returns its address."""
    with _hub(f"upload to {repository}") as hub:
        api = hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=str(folder)))


def download(repository: str, revision: str | None = None) -> Path:
    """Download a hub repository, or find it in the cache; returns the folder, for `bsi.load`."""
    wanted = [MODEL_FILE, "config.json", "README.md"]  # no code
    with _hub(f"download {repository}") as hub:
        return Path(hub.snapshot_download(repository, revision=revision, allow_patterns=wanted))


@contextmanager
def _hub(purpose: str) -> Iterator[Any]:
    """huggingface_hub; what it raises (no connection, no such repository, no token) becomes one message."""
    with extra("hub", "the Hugging Face hub"):
        import huggingface_hub  # type: ignore[import-not-found, unused-ignore]
    try:
        yield huggingface_hub
    except (OSError, ValueError) as error:  # its errors of HTTP and of missing files are of these kinds
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise UsageError(
            f"cannot {purpose} with the Hugging Face hub: {reason}. Check the name, the connection and `hf auth "
            f"whoami`; a folder that is on this machine is loaded by its path."
        ) from error
