"""The paper's numbers, beside which ours are shown: Tables "imagenet32", "architecture" and "cifar10-bpd".

Errors are standard deviations over three seeds, as printed; a CIFAR-10 network was trained once.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARCHITECTURE", "CIFAR10", "IMAGENET32", "IMAGENET64", "Printed"]


@dataclass(frozen=True)
class Printed:
    """A row of a table: bits per dimension and FID as printed."""

    bits: str
    fid: str | None = None


IMAGENET32: dict[str, Printed] = {
    "bfn": Printed("3.448 ± 0.005", "11.0 ± 0.1"),
    "vdm": Printed("3.452 ± 0.006", "9.9 ± 0.5"),
    "bsi": Printed("3.448 ± 0.006", "8.9 ± 0.1"),
}

IMAGENET64: dict[str, Printed] = {
    "bfn": Printed("3.222 ± 0.006", "38.2 ± 0.8"),
    "vdm": Printed("3.228 ± 0.006", "35.2 ± 0.7"),
    "bsi": Printed("3.218 ± 0.004", "30.1 ± 0.4"),
}

ARCHITECTURE: dict[str, Printed] = {
    "bfn": Printed("3.505 ± 0.001", "14.2 ± 0.4"),
    "vdm": Printed("3.527 ± 0.009", "15.4 ± 1.5"),
    "bsi": Printed("3.510 ± 0.009", "12.8 ± 0.6"),
}

# By training steps: VDM's and BFN's are those that their authors report for their budgets.
CIFAR10: dict[int, dict[str, Printed]] = {
    10_000_000: {"vdm": Printed("2.65"), "bsi": Printed("2.64")},
    5_000_000: {"bfn": Printed("2.66"), "bsi": Printed("2.65")},
}
