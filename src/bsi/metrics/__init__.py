"""Sample quality: FID, KID, precision and recall, from iterators of 8-bit images.

    from bsi.metrics import Inception, collect, reference, sample_quality

    extractor = Inception(device="cuda")
    real = reference("cifar10", version, "test", batches_of(test), extractor)        # computed once, then stored
    print(sample_quality(collect(batches_of(samples), extractor), real, extractor))  # batches: uint8 (n, 3, h, w)

On several ranks each collects its own samples, then all call `features.over_ranks()`; the result is that of one rank.
"""

from bsi.metrics.frechet import Moments, frechet_distance, frechet_error
from bsi.metrics.inception import Inception
from bsi.metrics.quality import (
    KEPT,
    Extractor,
    Features,
    Generation,
    QualityWarning,
    Reference,
    SampleQuality,
    collect,
    metric_name,
    reference,
    sample_quality,
)
from bsi.metrics.two_sample import Kid, PrecisionRecall, kernel_distance, precision_recall

__all__ = [
    "KEPT", "Extractor", "Features", "Generation", "Inception", "Kid", "Moments", "PrecisionRecall", "QualityWarning",
    "Reference", "SampleQuality", "collect", "frechet_distance", "frechet_error", "kernel_distance", "metric_name",
    "precision_recall", "reference", "sample_quality",
]  # fmt: skip
