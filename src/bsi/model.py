"""`Model`: the main user interface. It draws the noise and calls the functions that take (method, predict, ...).

    model = bsi.Model(MyNet(), bsi.BSI(), shape=(3, 32, 32), data=bsi.Bins.uint8())
    model(x).mean().backward()                  # 2 L_M / n per sample; DDP and torch.compile can wrap the model
    images = model.sample(16, seed=0)
    print(model.bits_per_dim(test))             # the bound, with its two errors

Integer tensors are bin indices or symbols, floats are values. density.py has the loss, predictions and bounds,
generation.py the samples; this file stores and loads.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from torch import nn

from bsi.generation import Generation


class Model(Generation):
    """A network, a method and a description of the data.

    Calling the model, `model(x)`, returns the training loss of each sample, so that `torch.compile` and
    `DistributedDataParallel` can wrap it. A prediction is `model.predict(latent, level)`.

    Args:
        backbone: is called as `backbone(input, t)`, or `backbone(input, t, cond)` with a condition. `input` are latents
            (scaled to unit variance with the `edm` parametrization, BSI's), t is in [0, 1], 0 at the noisy end.
        method: `bsi.BSI()`, `bsi.BFN()`, `bsi.VDM()` or your own.
        shape: of one sample.
        data: the kind of the data: `bsi.Bins` for integers that are numbers, such as 8-bit images, `bsi.Symbols` for
            integers without an order, such as text, or `bsi.Standardize` for continuous data. By default the data is
            continuous, in its own units.
        parametrization: what the network predicts; by default what the method's networks do.
        sigma_data: the standard deviation of the data, for preconditioning.
        class_names: names of the labels 0, 1, ...
    """

    @classmethod
    def from_pretrained(
        cls, source: str | Path, backbone: nn.Module | None = None, revision: str | None = None
    ) -> Model:
        """Load a model onto the CPU, in evaluation mode. Files hold weights and a description, and no code.

        Args:
            source: The name of a bundled network (`digits`), a folder of `save_pretrained`, a run folder, an exported
                file, or a repository of the Hugging Face hub, `USER/NAME`, that `push_to_hub` made.
            backbone: Your own network, if the model has one.
            revision: A branch, tag or commit of a hub repository.

        Example:

            >>> bsi.Model.from_pretrained("digits").sample(4, steps=8).shape
            torch.Size([4, 1, 8, 8])
        """
        from bsi.runtime import export, hub

        if hub.is_repository(source):
            source = hub.download(str(source), revision)
        return export.load(source, backbone=backbone)

    def save_pretrained(self, folder: str | Path, name: str | None = None) -> Path:
        """Write the model as a folder: model.safetensors, config.json and a model card. No run folder is needed.

        A network of `bsi.backbones` is rebuilt by `from_pretrained`; your own is passed again:
        `bsi.Model.from_pretrained("my-model", backbone=MyNet())`.

        Args:
            folder: Is made if it does not exist; files in it are replaced.
            name: The name in the model card, by default that of the folder.
        """
        from bsi.runtime import export, hub

        name = name or re.sub(r"\W+", "-", Path(folder).resolve().name).strip("-") or "model"
        return hub.write_model_folder(export.Trained.of(self, name), Path(folder))

    def push_to_hub(self, repository: str, private: bool = True) -> str:
        """Upload the model to the Hugging Face hub, with the token of `hf auth login`, and return its address.

        Args:
            repository: `USER/NAME`.
        """
        from bsi.runtime import hub

        with tempfile.TemporaryDirectory() as folder:
            return hub.upload(self.save_pretrained(folder, repository.rpartition("/")[2]), repository, private)
