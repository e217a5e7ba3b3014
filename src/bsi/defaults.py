"""How samples are drawn where nobody says otherwise: the one place, chosen by measurement. Imports no torch.

`Model.sample`, `bsi sample`, `bsi eval --fid`, the samples along a training run, the page and the studies all read it.
docs/benchmarks/solvers.md has the FIDs behind it: chosen on one CIFAR-10 network, and on another, with 16 evaluations,
0.981 +- 0.007 times the FID of the paper's sampler with 1024 steps.
"""

from __future__ import annotations

__all__ = ["GRID", "MEASURING_SOLVER", "SOLVER", "STEPS"]

SOLVER = "ode2"
GRID = "edm"
STEPS = 15  # 16 evaluations with BSI and BFN

# What starts from a given measurement needs the noise of measurements on the rest of its way, which a flow has not. Of
# the solvers with noise, the best by FID with 16 evaluations.
MEASURING_SOLVER = "sde2"
