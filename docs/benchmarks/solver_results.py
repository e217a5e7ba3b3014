"""The results of solvers.py: rows that are written after each case, so that it can resume.

results.json     what was measured, and a row for each case
results.csv      the same rows
table.md         one row for each solver and grid, one column for each number of evaluations
figure.svg       the same as a plot
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bsi.grids import GRIDS, named_grid
from bsi.methods import BFN, Method
from bsi.sampling import evaluations
from bsi.solvers import SOLVERS

Row = dict[str, object]
LABELS = {"fid": "FID", "distance": "distance to the converged sample"}


@dataclass(frozen=True)
class Case:
    """One point of a figure: a network or an oracle, and how it is sampled."""

    network: str
    solver: str
    grid: str
    evaluations: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.network}/{self.solver}/{self.grid}/{self.evaluations}/{self.seed}"

    def levels(self, method: Method):
        """The grid with this many evaluations: k + 1 are k steps with BSI or BFN, and k + 1 steps with VDM."""
        return named_grid(self.grid)(method, max(1, self.evaluations - evaluations(method, 0)))


def pairs(method: Method, solvers: Sequence[str], grids: Sequence[str]) -> list[tuple[str, str]]:
    """Solvers with grids. For BSI and VDM the paper's grid is the geometric one, so each pair is listed once."""
    same = not isinstance(method, BFN)
    twice = {(solver, "geometric" if solver == "posterior" else "paper") for solver in SOLVERS} if same else set()
    return [(solver, grid) for solver in solvers for grid in grids if (solver, grid) not in twice]


class Results:
    """The rows of one folder. `about` is common to all of them; other rows are rejected."""

    def __init__(self, folder: Path, value: str, about: Row) -> None:
        self.folder, self.value, self.about = folder, value, about
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.json"
        self.rows: list[Row] = []
        if self.file.exists():
            found = json.loads(self.file.read_text())
            if found["about"] != about:
                raise SystemExit(f"{folder} holds results of {found['about']}, got {about}. Choose another --out.")
            self.rows = found["rows"]

    def find(self, case: Case, weights: str = "") -> Row | None:
        wanted = {**asdict(case), "weights": weights}
        return next((row for row in self.rows if all(row[key] == wanted[key] for key in wanted)), None)

    def add(self, case: Case, weights: str, **found: object) -> None:
        self.rows.append({**asdict(case), "weights": weights, **found})
        shown = "   ".join(f"{key} {value:.5g}" for key, value in found.items() if isinstance(value, float))
        print(f"{case.name:<40} {shown}", flush=True)
        self.write()

    def write(self) -> None:
        if not self.rows:
            return
        temporary = self.file.with_suffix(".part")
        temporary.write_text(json.dumps({"about": self.about, "rows": self.rows}, indent=1))
        temporary.replace(self.file)
        with (self.folder / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in self.rows for key in row)))
            writer.writeheader()
            writer.writerows(self.rows)

    def networks(self) -> list[str]:
        return list(dict.fromkeys(str(row["network"]) for row in self.rows))

    def line(self, network: str, solver: str, grid: str, seed: object = None) -> dict[int, Row]:
        """The rows of one line by evaluations; of several seeds, the first that was measured."""
        chosen = [row for row in self.rows if (row["network"], row["solver"], row["grid"]) == (network, solver, grid)]
        return {int(row["evaluations"]): row for row in reversed(chosen) if seed is None or row["seed"] == seed}

    def table(self) -> str:
        """Markdown, a table for each network."""
        blocks = []
        for network in self.networks():
            lines = {pair: self.line(network, *pair) for pair in [(s, g) for s in SOLVERS for g in GRIDS]}
            counts = sorted({count for line in lines.values() for count in line})
            head = f"| {network}: {self.value}, by evaluations | " + " | ".join(map(str, counts)) + " |"
            body = [
                f"| `{solver}`, {grid} | " + " | ".join(self._cell(line.get(count)) for count in counts) + " |"
                for (solver, grid), line in lines.items()
                if line
            ]
            blocks.append("\n".join([head, "|---" * (len(counts) + 1) + "|", *body]))
        return "\n\n".join(blocks) + "\n"

    def _cell(self, row: Row | None) -> str:
        if row is None:
            return ""
        return f"{row[self.value]:.4g}" + (f" ± {row['error']:.2g}" if "error" in row else "")

    def draw(self) -> None:
        """The value by evaluations: colors are solvers, dashes are grids, one panel for each network."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

        pyplot.rcParams["svg.fonttype"] = "none"  # text instead of outlines: a tenth of the size
        pyplot.rcParams["svg.hashsalt"] = "bsi"  # a file that depends on the rows alone
        names = self.networks()
        figure, panels = pyplot.subplots(1, len(names), figsize=(1.7 + 3.6 * len(names), 3.8), squeeze=False)
        styles = dict(zip(GRIDS, ("-", "--", "-."), strict=True))
        colors = dict(zip(SOLVERS, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
        for axes, name in zip(panels[0], names, strict=True):
            for solver in SOLVERS:
                for grid in GRIDS:
                    line = sorted(self.line(name, solver, grid).items())
                    if line:
                        errors = [row.get("error", 0.0) for _, row in line]
                        axes.errorbar([count for count, _ in line], [row[self.value] for _, row in line], errors,
                                      fmt=styles[grid], marker=".", elinewidth=1, color=colors[solver],
                                      label=f"{solver}, {grid}")  # fmt: skip
            # the distance of an oracle can be 0
            found = [row[self.value] for row in self.rows]
            scale = "log" if min(found) > 0 else "linear"
            axes.set(xscale="log", yscale=scale, xlabel="network evaluations", ylabel=LABELS[self.value])
            evaluated = [row["evaluations"] for row in self.rows]
            counts = [2**i for i in range(20) if min(evaluated) <= 2**i <= max(evaluated)]
            axes.set_xticks(counts, [str(count) for count in counts])
            few = MaxNLocator(8, steps=[1, 2, 5, 10]) if max(found) < 4 * min(found) else LogLocator(subs=(1, 2, 5))
            axes.yaxis.set(major_locator=few, major_formatter=StrMethodFormatter("{x:g}"), minor_locator=NullLocator())
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{name}: {self.about['of']}", fontsize=9)
            axes.grid(True, which="both", alpha=0.2)
        drawn = [axes.get_legend_handles_labels() for axes in panels[0]]
        named = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
        panels[0][-1].legend(named.values(), named, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), handlelength=5)
        figure.tight_layout()
        figure.savefig(self.folder / "figure.svg", metadata={"Date": None})
        pyplot.close(figure)

    def publish(self) -> None:
        if self.rows:
            (self.folder / "table.md").write_text(self.table())
            self.draw()
