"""BSI as a diffusion model, Appendix "Diffusion Models": the noising process, from high to low precision.

Given the belief mean mu' at lambda' = lambda + alpha' and the sample x, the mean mu at lambda = lambda_0 + alpha has
the distribution

    p(mu | mu', x) = N_P( xi^-1 [ lambda lambda' / alpha' mu' + lambda (alpha / (alpha + c) - 1) x ],  xi ),
    xi = lambda^2 ( 1 / (alpha + c) + 1 / alpha' ),        c = lambda_0^2 / gamma_0.

It depends on x, so the process is not a Markov chain, except for gamma_0 = inf, where c = 0, as in BFN.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from bsi.errors import UsageError
from bsi.gaussian import Normal, over
from bsi.methods.bsi import BSI

Data = Float[Tensor, "batch *data"]
PerSample = Float[Tensor, " batch"]


def noising(method: BSI, sharp: Data, x: Data, sharp_level: PerSample, level: PerSample) -> Normal:
    """Equation "diffusion BSI forward": the belief mean at `level`, given that at the higher `sharp_level`, and x."""
    alpha, gained = method.gain(level), sharp_level.double() - level.double()
    if bool((alpha < 0).any()) or bool((gained <= 0).any()):
        raise UsageError("noising goes from a sharper belief to a broader one: lambda_0 <= level < sharp_level")
    level, sharp_level, known = level.double(), sharp_level.double(), alpha + method.c
    # All terms are multiplied by (alpha + c) alpha': a deterministic initial belief (alpha + c = 0) needs no branch.
    xi = level.square() * (gained + known)
    mean = over(level * sharp_level * known / xi, x) * sharp - over(level * method.c * gained / xi, x) * x
    return Normal(mean, torch.sqrt(known * gained / xi))
