"""The three methods: one row of the paper's table "Central structures" per file."""

from bsi.methods.base import Decoder, Method, Parametrization, Predictor
from bsi.methods.bfn import BFN
from bsi.methods.bsi import BSI
from bsi.methods.vdm import VDM

__all__ = ["BFN", "BSI", "VDM", "Decoder", "Method", "Parametrization", "Predictor"]
