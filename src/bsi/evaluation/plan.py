"""How a subject is to be evaluated: the proposal over levels, and a control variate if there is one.

loguniform    the paper's
exact         Equation "expected-h", of which the log-uniform is the simplification
fitted        learned, with a control variate, from a pilot whose evaluations never enter the estimate; the control
              goes on learning, each part of the set from those before (control.py)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from bsi.errors import NonFinite
from bsi.evaluation.basis import Basis
from bsi.evaluation.control import Control, Observations, fit_control, fit_proposal
from bsi.evaluation.points import Pilot, noise
from bsi.evaluation.subject import Subject
from bsi.levels import ExpectedError, Fitted, Proposal
from bsi.methods.base import Method
from bsi.runtime.distributed import World

__all__ = ["Plan", "ProposalName", "describe", "expected_error", "make_plan", "shared_plans"]

ProposalName = Literal["loguniform", "exact", "fitted"]

PILOT_PART = 8  # the pilot takes one evaluation for this many of the first round, but
FEWEST, MOST = 256, 2048  # at least and at most so many: more would not be learned from
DESCRIBED = 2048  # samples that describe the data to the reference denoisers


@dataclass(frozen=True)
class Plan:
    """A proposal and a control variate; `pilot` counts the evaluations that were made to learn them alone."""

    proposal: Proposal
    control: Control | None = None
    pilot: int = 0


@torch.no_grad()
def make_plan(
    name: ProposalName,
    subject: Subject,
    measure: int,
    seed: int,
    batch: int,
    world: World,
    control: bool = True,
    basis: Basis | None = None,
) -> Plan:
    """The plan of that name. Every rank calls it and gets the same. Many plans for one set may share its `basis`."""
    if name == "loguniform":
        return Plan(subject.method.levels)
    if name == "exact":
        return Plan(expected_error(subject.method))
    return _fitted(subject, measure, seed, batch, world, control, describe(subject) if basis is None else basis)


def describe(subject: Subject) -> Basis:
    """What is known of these samples without a network, from some of them."""
    return Basis.fit(subject.method, subject.spread_out(DESCRIBED), subject.bins)


def expected_error(method: Method) -> ExpectedError:
    """p ~ E |x - psi|^2 = offset / level^2 + 1 / level for data of unit variance; offset is lambda_0^2 for BSI."""
    low = method.levels.low
    first = method.encoder(torch.tensor(low, dtype=torch.float64))
    at_low = float((1 - first.signal).square() + first.noise.square())
    return ExpectedError(low, method.levels.high, max(0.0, low**2 * at_low - low))


def _fitted(subject: Subject, measure: int, seed: int, batch: int, world: World, control: bool, basis: Basis) -> Plan:
    pairs = min(MOST, max(FEWEST, subject.count * measure // PILOT_PART)) // 2
    pilot = Pilot(subject.count, pairs, seed)
    table = Observations.table(basis, pilot.samples, 2 * pilot.draws)
    for members in subject.batches(pilot.samples, batch, world):
        ids = pilot.ids(members)
        x, predict = subject.x(ids), subject.predict(ids)
        steady = basis.steady(x)
        for draw in range(2 * pilot.draws):
            level = subject.method.levels.icdf(pilot.t(members, draw // 2))
            eps = noise(seed, ids, "pilot", draw, subject.shape, x.dtype)
            g = subject.integrand(predict, x, level, eps)
            table[members, draw] = Observations.of(basis, steady, x, eps, torch.log(level), g).rows
    seen = Observations.from_rows(basis, world.sum(table).flatten(0, 1))
    bad = int((~torch.isfinite(seen.g)).sum())
    if bad:  # nothing can be learned from them, and the bound would not be finite either
        raise NonFinite(
            f"{bad} of the pilot's {len(seen.g)} evaluations are NaN or infinite: so are the network's predictions"
        )
    levels = subject.method.levels
    if not control:
        return Plan(fit_proposal(levels, basis.knots, seen.u, seen.g), None, pilot.evaluations)
    fitted = fit_control(basis, seen)
    left_over = seen.g - fitted.predict(seen)
    return Plan(fit_proposal(levels, basis.knots, seen.u, left_over), fitted, pilot.evaluations)


def shared_plans(a: Plan, b: Plan) -> tuple[Plan, Plan]:
    """Two fitted plans over the same levels with one proposal, so that both subjects see the same levels."""
    p, q = a.proposal, b.proposal
    if not (isinstance(p, Fitted) and isinstance(q, Fitted) and (p.low, p.high) == (q.low, q.high)):
        return a, b
    p_sum, q_sum = sum(p.weights), sum(q.weights)
    weights = tuple(v / p_sum + w / q_sum for v, w in zip(p.weights, q.weights, strict=True))
    both = Fitted(p.low, p.high, weights)
    return replace(a, proposal=both), replace(b, proposal=both)
