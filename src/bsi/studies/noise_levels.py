"""Figure "noise-levels": what the encoders of the three methods make of an image, from t = 0 to t = 1.

Nothing is trained. The top half of each picture is the encoder's mean, the bottom half a sample; gray is 0. The table
has the numbers of Section "Discussion": BFN adds little noise and is deterministic at t = 0, VDM keeps 8 % of the image
there, and BSI converges to its prior, with a variance of 15.85 at t = 0.1 against VDM's 0.96.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bsi.data.store import open_dataset
from bsi.gaussian import Encoder
from bsi.methods import METHODS
from bsi.rng import standard_normal
from bsi.studies import figures
from bsi.studies.estimates import Estimate
from bsi.studies.job import Measure
from bsi.studies.report import Claim, Report, Study, Table, Verdict
from bsi.studies.scale import METHOD_NAMES, Scale
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["STUDY", "encoder"]

TIMES = tuple(i / 10 for i in range(11))
IMAGES = {"digits": 3, "cifar10": 7, "imagenet32": 0}  # a test image with a motif that is told from its outline


def measures(scale: Scale) -> list[Measure]:
    return []


def encoder(method: str, t: float) -> Encoder:
    """q(psi | x, F^-1(t)) at the paper's parameters."""
    built = METHODS[method]()
    return built.encoder(built.levels.icdf(torch.tensor(t, dtype=torch.float64)))


def _image(scale: Scale) -> Float[Tensor, "1 channels height width"]:
    dataset = open_dataset(scale.comparisons[0].recipe("bsi").data.name)
    assert dataset.bins is not None
    index = IMAGES[dataset.name]
    return torch.from_numpy(dataset.bins.values(np.asarray(dataset.split("test")[index : index + 1]))).float()


def _picture(x: Float[Tensor, "1 channels height width"], seen: Encoder) -> np.ndarray:
    """Mean above, sample below, as 8-bit pixels; what lies outside [-1, 1] is black or white."""
    eps = standard_normal(0, torch.zeros(1, dtype=torch.long), 0, tuple(x.shape[1:]))
    mean = float(seen.signal) * x
    sample = mean + float(seen.noise) * eps
    half = x.shape[2] // 2
    both = torch.cat([mean[:, :, :half], sample[:, :, half:]], dim=2)
    return torch.round((both.clamp(-1, 1) + 1) * 127.5).to(torch.uint8).numpy()


def _draw(scale: Scale) -> Figure:
    x = _image(scale)
    shown = np.concatenate([_picture(x, encoder(method, t)) for method in METHOD_NAMES for t in TIMES])
    height, width = shown.shape[2:]
    figure, (axes,) = figures.panels(1, width=7.4, height=2.4)
    axes.imshow(figures.tile(shown, len(TIMES), gap=max(1, height // 16)), interpolation="nearest")
    step, rise = width + max(1, height // 16), height + max(1, height // 16)
    axes.set_xticks([i * step + width / 2 for i in range(len(TIMES))], [f"{t:g}" for t in TIMES])
    axes.set_yticks([i * rise + height / 2 for i in range(len(METHOD_NAMES))], [figures.NAMES[m] for m in METHOD_NAMES])
    for tick, method in zip(axes.get_yticklabels(), METHOD_NAMES, strict=True):
        tick.set(color=figures.COLORS[method], fontweight="bold", fontsize=10)
    axes.set_xlabel("t: noise at 0, data at 1 (above the mean, below a sample)")
    axes.grid(False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _exactly(statement: str, value: float, printed: float, places: int) -> Claim:
    """A number without an error: it is the printed one when it rounds to it."""
    verdict: Verdict = "held" if round(value, places) == printed else "not held"
    return Claim(statement, verdict, f"{value:.4f}, printed {printed:g}")


def report(scale: Scale, store: Store) -> Report:
    rows = []
    for t in TIMES:
        seen = [encoder(method, t) for method in METHOD_NAMES]
        rows.append((float(t), *(float(v) for e in seen for v in (e.signal, e.noise**2))))
    columns = [f"{figures.NAMES[method]} {part}" for method in METHOD_NAMES for part in ("signal", "variance")]
    bfn, bsi = encoder("bfn", 0.0), encoder("bsi", 0.0)
    largest = max(float(encoder("bfn", t / 1000).noise) ** 2 for t in range(1001))
    return Report(
        tables=(Table("encoders", ("t", *columns), tuple(rows)),),
        claims=(
            _exactly("BSI's variance at t = 0.1", float(encoder("bsi", 0.1).noise) ** 2, 15.85, 2),
            _exactly("VDM's variance at t = 0.1", float(encoder("vdm", 0.1).noise) ** 2, 0.96, 2),
            _exactly("What VDM keeps of the image at t = 0", float(encoder("vdm", 0.0).signal), 0.08, 2),
            _exactly("BFN is deterministic at t = 0: its variance", float(bfn.noise) ** 2, 0.0, 12),
            _exactly("BSI keeps nothing of the image at t = 0", float(bsi.signal), 0.0, 12),
        ),
        draw=lambda: _draw(scale),
        notes=(f"BFN's variance is at most {Estimate(largest, 0.0)}, at any t.",),
    )


STUDY = Study(
    name="noise-levels",
    paper='Figure "noise-levels"',
    shows="encoders of the three methods, mean and sample, over t",
    measures=measures,
    report=report,
)
