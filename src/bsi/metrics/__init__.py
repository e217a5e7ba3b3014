"""Sample quality: FID, KID, precision and recall, from iterators of 8-bit images.

    from bsi.metrics import Inception, collect, reference, sample_quality

    extractor = Inception(device="cuda")
    real = reference("cifar10", version, "test", batches_of(test), extractor)        # stored; computed the first time
    print(sample_quality(collect(batches_of(samples), extractor), real, extractor))  # batches: uint8 (n, 3, h, w)

On several ranks each collects its own samples, then all call `features.over_ranks()`; the result is that of one rank.
"""

from bsi.metrics.extractor import Extractor, QualityWarning
from bsi.metrics.features import Features, collect
from bsi.metrics.frechet import Moments, frechet_distance
from bsi.metrics.frechet_error import frechet_error
from bsi.metrics.inception import Inception
from bsi.metrics.kid import Kid, kernel_distance
from bsi.metrics.neighbors import PrecisionRecall, precision_recall
from bsi.metrics.quality import Generation, SampleQuality, metric_name, sample_quality
from bsi.metrics.references import Reference, reference

__all__ = [
    "Extractor",
    "Features",
    "Generation",
    "Inception",
    "Kid",
    "Moments",
    "PrecisionRecall",
    "QualityWarning",
    "Reference",
    "SampleQuality",
    "collect",
    "frechet_distance",
    "frechet_error",
    "kernel_distance",
    "metric_name",
    "precision_recall",
    "reference",
    "sample_quality",
]
