"""Features of 8x8 digits for the Fréchet distance `fd-digits`: these images are too small for Inception.

The network is a small classifier of these digits, trained once by `fit` on the training part. Its weights are
part of the package (digits_features.safetensors), so that the distance is the same everywhere. The features are the 32
activations before its logits. Values of `fd-digits` are comparable only with each other.

    conv 1 -> 16, 3x3 · conv 16 -> 32, 3x3, stride 2 · linear 512 -> 32 (the features) · linear 32 -> 10
"""

from __future__ import annotations

import hashlib
from importlib import resources

import safetensors.torch
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from bsi.data.store import open_dataset
from bsi.errors import DataError
from bsi.values import to_uint8

WEIGHTS = "digits_features.safetensors"
DIM = 32


class Classifier(nn.Module):
    """Values in [-1, 1] to features and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv_2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.hidden = nn.Linear(32 * 16, DIM)
        self.logits = nn.Linear(DIM, 10)

    def features(self, x: Float[Tensor, "n 1 8 8"]) -> Float[Tensor, "n 32"]:
        x = nn.functional.silu(self.conv_2(nn.functional.silu(self.conv_1(x))))
        return nn.functional.silu(self.hidden(x.flatten(1)))

    def forward(self, x: Float[Tensor, "n 1 8 8"]) -> Float[Tensor, "n 10"]:
        return self.logits(self.features(x))


class DigitsFeatures:
    """A `bsi.metrics.Extractor`: the classifier with the weights of the package."""

    name = "digits"
    resize = "none"
    precision = "float32"
    dim = DIM

    def __init__(self, device: torch.device | str = "cpu") -> None:
        data = packaged_weights()
        self.hash = hashlib.sha256(data).hexdigest()
        self.device = torch.device(device)
        self._network = Classifier()
        self._network.load_state_dict(safetensors.torch.load(data))
        self._network.to(self.device).eval()

    @torch.no_grad()
    def __call__(self, images: UInt8[Tensor, "n 3 h w"]) -> Float[Tensor, "n dim"]:
        if images.shape[2:] != (8, 8):
            raise DataError(f"fd-digits needs images of 8x8 pixels, got {tuple(images.shape[2:])}. Use FID for others.")
        gray = images[:, :1].to(self.device)
        return self._network.features(gray.float() / 127.5 - 1)

    @torch.no_grad()
    def classify(self, images: UInt8[Tensor, "n 3 h w"]) -> Int[Tensor, " n"]:
        """The digit that each image shows."""
        return self._network(images[:, :1].to(self.device).float() / 127.5 - 1).argmax(1)


def packaged_weights() -> bytes:
    return (resources.files("bsi.studies") / WEIGHTS).read_bytes()


def fit(steps: int = 3000, batch: int = 128) -> dict[str, Tensor]:
    """Train the weights of the package: AdamW on shifted training digits, from a fixed seed on one thread."""
    digits = open_dataset("digits")
    assert digits.bins is not None
    assert digits.labels is not None
    x = torch.from_numpy(to_uint8(digits.bins.values(digits.train), -1.0, 1.0)).float() / 127.5 - 1
    labels = torch.from_numpy(digits.labels.train.copy()).long()
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        ids = torch.randint(len(x), (batch,), generator=generator)
        shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
        loss = nn.functional.cross_entropy(network(x[ids].roll(shift, (2, 3))), labels[ids], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: tensor.detach().contiguous() for name, tensor in network.state_dict().items()}
