"""What a study comes to: tables, a figure, and for each claim of the paper one sentence on whether it held.

A claim held, or was contradicted, only beyond two standard errors; in between it is undecided.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bsi.studies.estimates import Estimate
from bsi.studies.job import Measure
from bsi.studies.scale import Scale
from bsi.studies.store import Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Cell",
    "Claim",
    "Report",
    "Study",
    "Table",
    "Verdict",
    "all_of",
    "as_csv",
    "equal",
    "less",
    "seeds_said",
    "text",
]

Cell = str | int | float | Estimate | None
Verdict = Literal["held", "not held", "undecided"]

STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns; `name` tells the tables of a study apart."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), self.name

    def records(self) -> list[dict[str, Any]]:
        """One dictionary for each row; an estimate is two entries, its value and its error."""
        found = []
        for row in self.rows:
            record: dict[str, Any] = {}
            for column, cell in zip(self.columns, row, strict=True):
                if isinstance(cell, Estimate):
                    record |= {column: cell.value, f"{column} error": cell.error}
                else:
                    record[column] = cell
            found.append(record)
        return found

    def markdown(self) -> str:
        lines = [_markdown_row(self.columns), "|" + "---|" * len(self.columns)]
        lines += [_markdown_row([text(cell) for cell in row]) for row in self.rows]
        return "\n".join(lines)


def as_csv(tables: Sequence[Table]) -> str:
    """All tables as one, the columns of each and its name in the first: what reads CSV reads it."""
    records = [{"table": table.name, **record} for table in tables for record in table.records()]
    names = list(dict.fromkeys(name for record in records for name in record))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _markdown_row(cells: Sequence[str]) -> str:
    """A bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def text(cell: Cell) -> str:
    """A cell for people."""
    if cell is None:
        return "–"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True)
class Claim:
    """A statement of the paper (or a question of ours), the verdict, and the numbers behind it."""

    statement: str
    verdict: Verdict
    because: str

    def said(self, seeds: int) -> str:
        """In one sentence."""
        return f"{self.statement}: {self.verdict}{seeds_said(seeds)} ({self.because})."


def seeds_said(seeds: int) -> str:
    """Behind a verdict: with one seed no error has in it what training anew would change, with two it is a rough one;
    0 is for what needs no training."""
    return {1: ", for one seed", 2: ", for two seeds"}.get(seeds, "")


def less(statement: str, a: Estimate, b: Estimate, difference: Estimate | None = None) -> Claim:
    """a < b; `difference` is a - b where it is known better than from the two."""
    gap = a - b if difference is None else difference
    sure = abs(gap.value) > STANDARD_ERRORS * gap.error
    verdict: Verdict = "undecided" if not sure else "held" if gap.value < 0 else "not held"
    return Claim(statement, verdict, f"{a} against {b}, difference {gap}")


def equal(statement: str, differences: Sequence[tuple[str, Estimate]], tolerance: float) -> Claim:
    """All differences are smaller than `tolerance`, beyond doubt; not held if one is larger, beyond doubt."""
    verdicts: list[Verdict] = []
    for _, gap in differences:
        margin = STANDARD_ERRORS * gap.error
        if abs(gap.value) + margin < tolerance:
            verdicts.append("held")
        else:
            verdicts.append("not held" if abs(gap.value) - margin > tolerance else "undecided")
    verdict: Verdict = "not held" if "not held" in verdicts else "undecided" if "undecided" in verdicts else "held"
    shown = ", ".join(f"{name} {gap}" for name, gap in differences)
    return Claim(statement, verdict, f"{shown}; equal means less than {tolerance:g} apart")


def all_of(statement: str, claims: Sequence[Claim]) -> Claim:
    """Held if all are; not held if one is not."""
    verdicts = [claim.verdict for claim in claims]
    verdict: Verdict = "not held" if "not held" in verdicts else "undecided" if "undecided" in verdicts else "held"
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in ("held", "undecided", "not held") if v in verdicts)
    return Claim(statement, verdict, f"of {len(claims)} comparisons: {counts}")


@dataclass(frozen=True)
class Report:
    """The outcome of a study at one scale; one that is not finished has no figure and claims nothing."""

    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    draw: Callable[[], Figure] | None
    notes: tuple[str, ...] = ()
    seeds: int | None = None
    """From how many seeds the networks were trained that the claims are about, where there are others beside them."""


@dataclass(frozen=True)
class Study:
    """One table or figure: what it needs to have measured, and what it makes of it."""

    name: str
    paper: str
    """The paper's tables and figures, by name; "new" for what is not in it."""
    shows: str
    measures: Callable[[Scale], list[Measure]]
    report: Callable[[Scale, Store], Report]
    scaled: bool = True
    """Whether it says something else at another scale."""

    def takes_seeds(self, scale: Scale) -> bool:
        """Whether more seeds train more networks of it, or it looks at those of the first seed alone, or at none."""
        return any(job.network.seed > 0 for job in self.measures(scale.with_seeds(2)))

    def command(self, scale: Scale) -> str:
        """What redoes it at a scale, in a folder of anyone's choice."""
        asked = scale.asked_seeds is not None and self.takes_seeds(scale)
        seeds = f" --seeds {scale.asked_seeds}" if asked else ""
        return f"bsi study {self.name} --scale {scale.name}{seeds} --out FOLDER"
