"""New: what sample quality costs in likelihood. The loss is weighted over the level, by its signal-to-noise ratio.

Most bits of the ELBO describe the least significant, invisible digits of the pixels. Weights that fall at high
signal-to-noise ratios (objective.py) spend the network's capacity on what is visible. All networks, also that of the
ELBO, are trained at levels drawn in proportion to the expected loss; the last row, the ELBO at the paper's log-uniform
levels, shows the effect of these levels alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bsi.objective import edm_weight, sigmoid_weight
from bsi.recipe import Objective, Recipe
from bsi.studies import figures
from bsi.studies.comparison import our_solvers
from bsi.studies.job import OURS, OURS_NAME, Measure, measures_of, paper_sampler
from bsi.studies.report import Report, Results, Study, Table, less
from bsi.studies.scale import Scale

__all__ = ["STUDY", "objectives"]

ELBO, PAPER = Objective(levels="expected"), Objective()
ELBO_NAME, PAPER_NAME = "ELBO", "ELBO, the paper's levels"


def objectives(scale: Scale) -> dict[str, Objective]:
    found = {ELBO_NAME: ELBO}
    found |= {f"sigmoid, b = {b:g}": replace(ELBO, weight="sigmoid", bias=b) for b in scale.bias}
    return found | {"EDM": replace(ELBO, weight="edm"), PAPER_NAME: PAPER}


def networks(scale: Scale, objective: Objective) -> list[Recipe]:
    return [replace(recipe, objective=objective) for recipe in scale.parameters.networks("bsi")]


def measures(scale: Scale) -> list[Measure]:
    samplers = paper_sampler(scale.most_steps), OURS
    return [job for o in objectives(scale).values() for job in measures_of(scale, networks(scale, o), *samplers)]


def report(results: Results) -> Report:
    scale, sampler = results.scale, paper_sampler(results.scale.most_steps)
    trained = {name: networks(scale, objective) for name, objective in objectives(scale).items()}
    bits = {name: results.bits(found) for name, found in trained.items()}
    distances = {name: results.distance(found, sampler) for name, found in trained.items()}
    plain, papers = trained[ELBO_NAME], trained[PAPER_NAME]
    claims = []
    for name, found in trained.items():
        if name in (ELBO_NAME, PAPER_NAME):
            continue
        gap, cost = results.distance_difference(found, plain, sampler), results.bits_difference(plain, found)
        better = f"The weight {name} improves {scale.metric} over the ELBO's"
        worse = f"The weight {name} costs likelihood: the ELBO's bound is below"
        claims.append(less(better, distances[name], distances[ELBO_NAME], gap))
        claims.append(less(worse, bits[ELBO_NAME], bits[name], cost))
    statement = "Levels drawn where loss is expected improve the ELBO over log-uniform ones"
    claims.append(less(statement, bits[ELBO_NAME], bits[PAPER_NAME], results.bits_difference(plain, papers)))

    figure, (left, right) = figures.panels(2)
    method = scale.parameters.recipe("bsi").method
    level = method.levels.icdf(torch.linspace(0.05, 1, 400, dtype=torch.float64))
    encoder = method.encoder(level)
    log_snr = 2 * torch.log(encoder.signal / encoder.noise)
    weights = {ELBO_NAME: torch.ones_like(level), "EDM": edm_weight(method)(level)}
    weights |= {f"sigmoid, b = {b:g}": sigmoid_weight(method, b)(level) for b in scale.bias}
    for name, color in zip(trained, figures.PALETTE, strict=False):
        figures.line(
            left, [bits[name].value], [distances[name]], color, xerr=[bits[name].error], linestyle="", label=name
        )
        if name in weights:
            right.plot(log_snr, weights[name] / weights[name].max(), color=color)
    left.set_xlabel("bits per dimension")
    left.set_ylabel(f"{scale.metric}, {sampler.steps} steps")
    left.legend()
    left.set_title("Likelihood against quality")
    right.set_xlabel("ln SNR")
    right.set_ylabel("weight relative to the ELBO")
    right.set_title("The weights")
    columns = ("weight", "bits/dim", f"{scale.metric} at {sampler.steps}", f"{scale.metric}, {OURS_NAME}")
    rows = tuple((name, bits[name], distances[name], results.distance(trained[name])) for name in trained)
    return Report(
        tables=(Table("weights", columns, rows),),
        claims=tuple(claims),
        figure=figure,
        notes=(our_solvers({"BSI": plain[0]}, scale),),
        seeds=len(plain),
    )


STUDY = Study(
    name="weighting",
    paper="new",
    shows="bits/dim against FID when the loss is weighted over the level: what sample quality costs in likelihood",
    measures=measures,
    report=report,
)
