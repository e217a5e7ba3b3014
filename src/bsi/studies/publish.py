"""From finished studies to docs/results.md: figures and numbers are copied, the page is written anew from all of them.

docs/results/NAME-SCALE.png     the figure
docs/results/NAME-SCALE.json    the outcome: everything that the page says of it
docs/results/NAME-SCALE.txt     a remark, written by hand, where there is something to add
docs/results.md                 made from these by `page`; a test holds it to them
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from bsi.io import write_json, write_text
from bsi.studies.registry import STUDIES
from bsi.studies.report import Study, Verdict, seeds_said
from bsi.studies.scale import Scale
from bsi.studies.scales import SCALES

__all__ = ["page", "publish"]

INTRODUCTION = """# Results

The paper's figures, its tables of results, and two studies of ours. `bsi study NAME --scale SCALE --out FOLDER` redoes
one; `--plan` shows its jobs with their estimated minutes, and `--so-far` writes what there is of one that is not
finished. This page is written by `--publish docs` from what the studies measured, and says what they found, also where
that is not what the paper found.

| scale | what | what it can show |
|---|---|---|
| smoke | {smoke}; networks train for seconds | that everything runs. Its numbers are no evidence for any claim |
| mini | {mini}; DiTs of 10M parameters, U-Nets of 2M train for a minute or two | whether a claim shows at small scale |
| paper | {paper}; the paper's networks, budgets and seeds | the claims themselves |

"Held" and "not held" mean: beyond two standard errors. An error is one standard error: over seeds where there are
several, else the Monte Carlo error of a bound, or that of having drawn these samples. "For one seed" says that what
training anew would change is in no error: such a verdict is about these networks, and a second seed may turn it. "For
two seeds" says that the error has one degree of freedom, and may be much too small by chance; `--seeds 3` trains more.
Bars in figures are one standard error. In a study that is not finished "missing" is still to be measured; – is not
asked for.
`fd-digits` is a Fréchet distance in the features of a small classifier of digits, and is comparable to no FID.
"""


def publish(folders: Sequence[Path], docs: Path) -> Path:
    """Copy outcomes into docs/results and write the page."""
    target = docs / "results"
    target.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        found = json.loads((folder / "numbers.json").read_text("utf-8"))
        if not STUDIES[found["study"]].scaled and found["scale"] != "smoke":
            continue  # it says the same at every scale, and the page has it once
        path = target / f"{found['study']}-{found['scale']}.json"
        if better := _better(path, found):
            print(f"bsi study: {path} stays as it is: {better}. Delete it to publish this", file=sys.stderr)
            continue
        if found["left"] == 0:
            shutil.copyfile(folder / "figure.png", path.with_suffix(".png"))
        del found["commands"], found["about"]["command"]  # with the folders of one machine; `command` has it without
        write_json(path, found)
    write_text(docs / "results.md", page(target))
    return docs / "results.md"


def _better(path: Path, found: Mapping[str, Any]) -> str | None:
    """In what a published outcome is better than one that would replace it: it is finished, or from more seeds."""
    if not path.is_file():
        return None
    there = json.loads(path.read_text("utf-8"))
    if there.get("left"):
        return None
    if found["left"]:
        return "finished, and this is not"
    if there["seeds"] > found["seeds"]:
        return f"from {there['seeds']} seeds, and this is from {found['seeds']}"
    return None


def page(results: Path) -> str:
    """The whole page, from the outcomes that are there."""
    parts = [INTRODUCTION.format(**{name: scale.summary for name, scale in SCALES.items()}), _at_a_glance(results)]
    for study in STUDIES.values():
        parts.append(f"## {study.name}\n\n{_heading(study)}\n")
        scales = list(SCALES.values()) if study.scaled else [SCALES["smoke"]]
        parts += [_section(study, scale, results) for scale in scales]
    return "\n".join(parts)


def _heading(study: Study) -> str:
    where = "New, not in the paper" if study.paper == "new" else f"The paper's {study.paper}"
    return f"{where}: {study.shows}."


def _at_a_glance(results: Path) -> str:
    """Which claims held, study by study, at the scales that can show it."""
    scales = [scale for scale in SCALES.values() if scale.name != "smoke"]
    lines = [
        "How the claims fared, study by study:",
        "",
        f"| study | the paper's | {' | '.join(scale.name for scale in scales)} |",
        "|---" * (2 + len(scales)) + "|",
    ]
    for study in STUDIES.values():
        cells = [_verdicts(study, scale if study.scaled else SCALES["smoke"], results) for scale in scales]
        lines.append(f"| [{study.name}](#{study.name}) | {study.paper} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _verdicts(study: Study, scale: Scale, results: Path) -> str:
    found = _read(study, scale, results)
    if found is None:
        return "not yet run"
    if found.get("left"):
        return "unfinished"
    counts = Counter(claim["verdict"] for claim in found["claims"])
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in get_args(Verdict) if counts[verdict])
    return f"[{said + seeds_said(found['seeds']) if said else 'shown'}](#{study.name}-{scale.name})"


def _read(study: Study, scale: Scale, results: Path) -> Mapping[str, Any] | None:
    """A published outcome, if there is one."""
    path = results / f"{study.name}-{scale.name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _section(study: Study, scale: Scale, results: Path) -> str:
    found = _read(study, scale, results)
    if found is None:
        return f"### {study.name}, {scale.name}\n\nNot yet run: `{study.command(scale)}`\n"
    remark = results / f"{study.name}-{scale.name}.txt"
    return _outcome(study, scale, found, remark.read_text("utf-8").strip() if remark.is_file() else "")


def _outcome(study: Study, scale: Scale, found: Mapping[str, Any], remark: str) -> str:
    lines = [f"### {study.name}, {scale.name}", ""]
    if left := found.get("left"):  # results of before had to be finished
        done = len(found["measurements"])
        lines += [f"Unfinished: {done} of {done + left} measurements are there, and nothing is concluded.", ""]
    else:
        lines += [f"![{study.name} at the scale {scale.name}](results/{study.name}-{scale.name}.png)", ""]
    for claim in found["claims"]:
        lines += [f"- {claim['statement']}: **{claim['verdict']}{seeds_said(found['seeds'])}** ({claim['because']})."]
    lines += [""] if found["claims"] else []
    lines += [f"*Remark.* {remark}", ""] if remark else []
    for table in found["tables"]:
        lines += [f"{table['name'][0].upper()}{table['name'][1:]}:", "", table["markdown"], ""]
    lines += [note + "\n" for note in found["notes"]]
    made = f"{', '.join(found['hardware'])}; commit {', '.join(found['commits'])}"
    lines += [f"`{found['command']}` · {made}", ""]
    return "\n".join(lines)
