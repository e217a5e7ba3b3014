"""Figure "noise-levels": an image under the encoders of the three methods, from t = 0 to t = 1.

Nothing is trained. The top half of each picture is the encoder's mean, the bottom half a sample; gray is 0. The table
has the numbers of Section "Discussion": BFN adds little noise and is deterministic at t = 0, VDM keeps 8 % of the image
there, and BSI converges to its prior, with a variance of 15.85 at t = 0.1 against VDM's 0.96.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bsi.data.store import open_dataset
from bsi.gaussian import Encoder
from bsi.methods import METHODS
from bsi.pictures import grid
from bsi.rng import standard_normal
from bsi.studies import figures
from bsi.studies.job import Measure
from bsi.studies.report import Claim, Report, Results, Study, Table
from bsi.studies.scale import METHOD_NAMES, Scale

__all__ = ["STUDY", "encoder"]

TIMES = tuple(i / 10 for i in range(11))
IMAGES = {"digits": 3, "cifar10": 7, "imagenet32": 0}  # a test image with a clear motif


def measures(scale: Scale) -> list[Measure]:
    return []


def encoder(method: str, t: float) -> Encoder:
    """q(psi | x, F^-1(t)) at the paper's parameters."""
    built = METHODS[method]()
    return built.encoder(built.levels.icdf(torch.tensor(t, dtype=torch.float64)))


def _image(scale: Scale) -> Float[Tensor, "channels height width"]:
    dataset = open_dataset(scale.comparisons[0].recipe("bsi").data.name)
    assert dataset.bins is not None
    return torch.from_numpy(dataset.bins.values(np.asarray(dataset.split("test")[IMAGES[dataset.name]]))).float()


def _claim(statement: str, value: float, printed: float, places: int) -> Claim:
    """The claim that an exact value rounds to the printed one."""
    return Claim(
        statement, "held" if round(value, places) == printed else "not held", f"{value:.4f}, printed {printed:g}"
    )


def report(results: Results) -> Report:
    encoders = {(method, t): encoder(method, t) for method in METHOD_NAMES for t in TIMES}
    columns = [f"{figures.NAMES[method]} {part}" for method in METHOD_NAMES for part in ("signal", "variance")]
    rows = []
    for t in TIMES:
        seen = [encoders[method, t] for method in METHOD_NAMES]
        rows.append((t, *(float(value) for e in seen for value in (e.signal, e.noise**2))))
    variance = {key: float(e.noise) ** 2 for key, e in encoders.items()}
    largest = max(float(encoder("bfn", t / 1000).noise) ** 2 for t in range(1001))

    x = _image(results.scale)
    eps = standard_normal(0, torch.zeros(1, dtype=torch.long), 0, tuple(x.shape))[0]
    half, pictures = x.shape[1] // 2, []
    for e in encoders.values():
        mean = float(e.signal) * x
        sample = mean + float(e.noise) * eps
        pictures.append(torch.cat([mean[:, :half], sample[:, half:]], dim=1).numpy())
    figure, (axes,) = figures.panels(1, width=7.4, height=2.4)
    image = np.asarray(grid(np.stack(pictures), len(TIMES)))
    width, height = image.shape[1] / len(TIMES), image.shape[0] / len(METHOD_NAMES)
    axes.imshow(image, interpolation="nearest")
    axes.set_xticks([(i + 0.5) * width for i in range(len(TIMES))], [f"{t:g}" for t in TIMES])
    axes.set_yticks([(i + 0.5) * height for i in range(len(METHOD_NAMES))], [figures.NAMES[m] for m in METHOD_NAMES])
    axes.set_xlabel("t: noise at 0, data at 1 (top the mean, bottom a sample)")
    axes.grid(False)
    return Report(
        tables=(Table("encoders", ("t", *columns), tuple(rows)),),
        claims=(
            _claim("BSI's variance at t = 0.1", variance["bsi", 0.1], 15.85, 2),
            _claim("VDM's variance at t = 0.1", variance["vdm", 0.1], 0.96, 2),
            _claim("VDM's share of the image at t = 0", float(encoders["vdm", 0.0].signal), 0.08, 2),
            _claim("BFN is deterministic at t = 0: its variance", variance["bfn", 0.0], 0.0, 12),
            _claim("BSI's share of the image at t = 0", float(encoders["bsi", 0.0].signal), 0.0, 12),
        ),
        figure=figure,
        notes=(f"BFN's variance is at most {largest:.4g}, at any t.",),
    )


STUDY = Study(
    name="noise-levels",
    paper='Figure "noise-levels"',
    shows="encoders of the three methods, mean and sample, over t",
    measures=measures,
    report=report,
)
