"""The methods: one row of the paper's table "Central structures" per file, and their registry. Imports no torch.

A recipe, a run folder and an export name a method by its key in `METHODS` and hold its fields. To add a method, write a
frozen dataclass with the attributes of `Method`, and register it:

    bsi.methods.register("mine", Mine)
"""

from bsi.errors import UsageError
from bsi.methods.base import Decoder, Method, Parametrization, Predictor
from bsi.methods.bfn import BFN
from bsi.methods.bsi import BSI
from bsi.methods.vdm import VDM

__all__ = [
    "BFN",
    "BSI",
    "METHODS",
    "VDM",
    "Decoder",
    "Method",
    "Parametrization",
    "Predictor",
    "register",
]

METHODS: dict[str, type] = {"bsi": BSI, "bfn": BFN, "vdm": VDM}


def register(name: str, method: type) -> None:
    """Register a method under a name, so that recipes, run folders and exports can store it.

    Raises:
        UsageError: if the name is taken by another class.
    """
    if METHODS.setdefault(name, method) is not method:
        raise UsageError(f"the method name {name!r} is taken by {METHODS[name].__name__}. Choose another name.")
