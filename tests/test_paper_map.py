"""docs/paper-map.md is correct: every row's symbol and test exist, and no statement of the paper is missing."""

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
MAP = TESTS.parent / "docs" / "paper-map.md"

# The labels of the paper's lemmas, theorems, corollaries, algorithms, equations and tables, in the order of its source.
LABELS = re.findall(
    r"\S+",
    """
thm:posterior eq:posterior-update alg:generate thm:elbo thm:infinite-elbo eq:infinite-elbo eq:h thm:elbo-tighter
thm:elbo-encoder-closed-form thm:bsi-elbo-encoder-closed-form thm:importance-sampling eq:is-lm eq:expected-h alg:loss
alg:generate-specific tab:distributions eq:preconditioned-model eq:preconditioning eq:bfn-flow-distribution
eq:diffusion-markov-chain eq:diffusion-bsi-forward eq:stochastic-interpolant eq:si-forward eq:si-step eq:si-bsi-step
eq:precond-model eq:precond-precout-general thm:update-marginal eq:update-marginal thm:multi-update-marginal
eq:multi-update-marginal-marginal thm:kl-div-marginal-update eq:elbo-proof-elbo eq:elbo-proof-decoder
eq:elbo-proof-encoding eq:elbo-proof-lr-one eq:elbo-proof-latent-prior eq:lmeasure-sum-form
eq:inf-elbo-proof-riemann-sum eq:elbo-riemann-integral tab:model-params tab:unet-cifar10-params
tab:dit-imagenet32-params tab:unet-imagenet32-params tab:dit-imagenet64-params
""",
)

# Sections whose statements have no label of their own.
SECTIONS = re.findall(
    r"\S+",
    """
sec:sample-discovery sec:prior-distribution sec:variance-reduction sec:algorithms sec:discussion sec:preconditioning
sec:precision-encoding sec:hyperparameters sec:architecture sec:bfns sec:diffusion-models sec:stochastic-interpolants
sec:pmm sec:bits-per-dimension sec:preconditioning-derivation sec:experiment-details sec:limitations sec:smc
""",
)


class Row(NamedTuple):
    statement: str
    symbol: str
    test: str


def rows() -> list[Row]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in MAP.read_text().splitlines()
        if line[:2] == "| "
    ]
    return [Row(c[0], c[1].strip("`"), c[2].strip("`")) for c in cells if c[0] != "statement"]


ROWS = rows()


@cache
def names_in(file: str) -> set[str]:
    (path,) = TESTS.rglob(file)
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def resolve(dotted: str) -> object:
    """The object at a dotted path: the longest importable module, then attributes."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.statement)
def test_every_row_resolves_to_a_symbol_and_a_test(row):
    assert row.symbol.startswith("bsi.")
    assert callable(resolve(row.symbol))
    file, name = row.test.split("::")
    assert name in names_in(file)


@pytest.mark.parametrize("label", [*LABELS, *SECTIONS])
def test_no_statement_of_the_paper_is_missing(label):
    assert any(f"`{label}`" in row.statement for row in ROWS)


def test_no_label_is_invented():
    used = {label for row in ROWS for label in re.findall(r"`((?:thm|eq|alg|tab|sec):[a-z0-9-]+)`", row.statement)}
    assert used <= {*LABELS, *SECTIONS}
