"""How samples are drawn where nobody says otherwise: the one place, chosen by measurement. Imports no torch.

`Model.sample`, `bsi sample`, `bsi eval --fid`, the samples along a training run, the page and the studies all read it.
docs/benchmarks/solvers.md has the FIDs behind it: chosen on one CIFAR-10 network, and on another, with 16 evaluations,
0.981 +- 0.007 times the FID of the paper's sampler with 1024 steps. Which solver, the method decides
(`bsi.sampling.default_solver`).
"""

from __future__ import annotations

__all__ = ["GRID", "NOISY_SOLVER", "SOLVER", "STEPS"]

SOLVER = "ode2"
GRID = "edm"
STEPS = 15  # 16 evaluations with BSI and BFN

# For what needs noise on its way, which a flow has not: to forget a start that is not quite right, or to go on as
# measurements would from one that is given. Of the solvers with noise, the best by FID with 16 evaluations.
NOISY_SOLVER = "sde2"
