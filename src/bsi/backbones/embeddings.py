"""Section "Architecture": features of the input u = c_in mu, of the precision t, and of the position in an image.

- Fourier features of the input: u becomes (u, sin(2^i pi u), cos(2^i pi u)), so that the network can distinguish
  values that differ by less than a bin. They are computed in float32 or wider: bfloat16 resolves u to 2^-9, and the
  phase 2^8 pi u would be noise. If the features are rounded to bfloat16 *afterwards*, they still resolve u to about
  1e-5.
- Precision embedding: 16 sines and cosines of t with frequencies f spaced geometrically and amplitudes proportional
  to f^(-1/2). Then e(t) . e(s) = sum_i w_i cos(2 pi f_i (t - s)) with weights w ~ 1/f depends on t - s alone, and its
  spectral density is 1/f^2, that of exp(-|t - s| / l): similarity decreases steadily with the distance (it never
  increases again by more than 0.007), and has a cusp at 0, so that near values differ clearly. With equal amplitudes,
  the usual choice, it would increase again by up to 0.7.
- Positions: fixed sines and cosines, with an equal share of the width for each spatial axis. On two axes they equal the
  published DiT's up to the order of the channels, which makes no difference for training.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from bsi.backbones.config import PRECISION_DIM, fourier_exponents
from bsi.backbones.layers import lecun_
from bsi.errors import UsageError


class FourierFeatures(nn.Module):
    """(u, sin(2^i pi u) for all i, cos(2^i pi u) for all i), concatenated along the channels; u alone without bins."""

    def __init__(self, bins_count: int | None) -> None:
        super().__init__()
        self.exponents = fourier_exponents(bins_count)

    def forward(self, u: Float[Tensor, "batch channels *space"]) -> Float[Tensor, "batch more_channels *space"]:
        phases = [2.0**i * math.pi * u for i in self.exponents]
        return torch.cat([u, *map(torch.sin, phases), *map(torch.cos, phases)], dim=1)


class PrecisionEmbedding(nn.Module):
    """t in [0, 1] -> 32 numbers of mean square 1/2, as sines and cosines of unit amplitude would have.

    The slowest component makes an eighth of a turn over [0, 1], which is almost linear in t; the fastest makes 128
    turns, an eighth of one per 1/1024. Then |e(t + 1/1024) - e(t)| = 0.097 and |e(1) - e(0)| = 4.9 for every t.
    """

    SLOWEST, FASTEST = 1 / 8, 128.0

    def __init__(self) -> None:
        super().__init__()
        count = PRECISION_DIM // 2
        ratio = (self.FASTEST / self.SLOWEST) ** (1 / (count - 1))
        frequencies = torch.tensor([self.SLOWEST * ratio**i for i in range(count)], dtype=torch.float64)
        power = 1 / frequencies
        self.register_buffer("angular", (2 * math.pi * frequencies).float(), persistent=False)
        self.register_buffer("amplitude", (count * power / power.sum()).sqrt().float(), persistent=False)
        self.angular: Tensor
        self.amplitude: Tensor

    def forward(self, t: Float[Tensor, " batch"]) -> Float[Tensor, "batch dim"]:
        phase = t[:, None] * self.angular
        return torch.cat([self.amplitude * phase.sin(), self.amplitude * phase.cos()], dim=1)


class ConditionEmbedding(nn.Module):
    """SiLU(MLP(embedding of t) + label): the vector that every block is conditioned on.

    The label `num_classes` is the null class, for samples without a label, and for all samples if `cond` is None. The
    vector is computed in float32 even under autocast: with one row per sample, the cost is negligible.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        if num_classes < 0:
            raise UsageError(f"num_classes must be 0 (no labels) or more, got {num_classes}.")
        self.num_classes = num_classes
        self.embed = PrecisionEmbedding()
        self.expand = nn.Linear(PRECISION_DIM, width)
        self.mix = nn.Linear(width, width)
        self.labels = nn.Embedding(num_classes + 1, width) if num_classes else None
        lecun_(self.expand)
        lecun_(self.mix)
        if self.labels is not None:
            nn.init.normal_(self.labels.weight, std=0.5)  # about the standard deviation that t contributes

    def forward(
        self, t: Float[Tensor, " batch"], cond: Int[Tensor, " batch"] | None = None
    ) -> Float[Tensor, "batch width"]:
        with torch.autocast(t.device.type, enabled=False):
            condition = self.mix(silu(self.expand(self.embed(t))))
            if self.labels is not None:
                labels = torch.full_like(t, self.num_classes, dtype=torch.long) if cond is None else cond
                condition = condition + self.labels(labels)
            elif cond is not None:
                raise UsageError("got labels for a network built without them. Build it with num_classes=...")
            return silu(condition)


def positions(grid: tuple[int, ...], width: int) -> Float[Tensor, "tokens width"]:
    """Fixed sinusoidal positions of the points of a grid with any number of axes, row-major.

    Each axis gets 2 * (width // (2 * axes)) channels: first sines, then cosines of n / 10000^(i / count). Remaining
    channels are 0.
    """
    count = width // (2 * len(grid))
    omega = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
    coordinates = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in grid), indexing="ij")
    phases = [axis.reshape(-1, 1) * omega for axis in coordinates]
    features = torch.cat([part for phase in phases for part in (phase.sin(), phase.cos())], dim=1)
    return pad(features, (0, width - features.shape[1])).float()
