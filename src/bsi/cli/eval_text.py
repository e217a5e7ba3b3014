"""What `bsi eval` found, for people: the records as a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["bound_line", "text"]


def text(records: list[Mapping[str, Any]]) -> str:
    """The records for people."""
    return "\n".join(_paragraph(record) for record in records)


def _paragraph(record: Mapping[str, Any]) -> str:
    if "metric" in record:
        made, error, drawing = record["generation"], record["error"], record["drawing"]
        guidance, classes = drawing["guidance"], min(record["n"], drawing["classes"])
        spread = "" if error is None else f" ± {error:.3f}"
        kind = f" of {classes} classes in turn" if classes else ""
        followed = "" if guidance == 1 else f", guidance {guidance:g}"
        return (
            f"{record['metric']} {record['value']:.3f}{spread}: {record['n']} samples{kind} ({made['solver']}, "
            f"{made['evaluations']} evaluations{followed}, seed {made['seed']}) against {record['reference_n']} of "
            f"{record['reference']} ({record['reference_split']}); {record['extractor']}, {record['resize']}"
        )
    if "difference" in record:
        unpaired = record["unpaired_error"]
        without = "" if unpaired is None else f"; without pairing the first error would be {unpaired:.5f}"
        return (
            f"{record['difference']:+.5f} bits/dim{_errors(record)}\n  {record['a']['run']} less {record['b']['run']}"
            f"{without}"
        )
    bound = "infinitely many" if record["finite_k"] is None else record["finite_k"]
    terms = {name: record[name] for name in ("measurement", "reconstruction", "prior")}
    if record["change_of_units"]:
        terms["change of units"] = record["change_of_units"]
    return (
        f"{bound_line(record)}\n"
        f"  {', '.join(f'{name} {value:.5f}' for name, value in terms.items())}; {bound} rounds of measurement\n"
        f"  {record['images']} {record['split']} samples of {record['dataset']} "
        f"({record['dataset_version'][:12]}), {record['evaluations']} evaluations, {record['proposal']} levels\n"
        f"  weights {record['weights_sha256'][:12]} at step {record['step']}, {record['precision']}"
    )


def bound_line(record: Mapping[str, Any]) -> str:
    """A bound with its errors, in one line."""
    return f"{record['bits_per_dim']:.5f} bits/dim{_errors(record)}"


def _errors(record: Mapping[str, Any]) -> str:
    """Both errors, as far as they are known: one level and one reconstruction tell nothing of their own."""
    limit = "" if record["data_resolved"] else "at most "  # hidden by the Monte Carlo noise
    known = {"Monte Carlo": ("", record["monte_carlo_error"]), "data set": (limit, record["data_error"])}
    return "".join(f" ± {most}{error:.5f} ({what})" for what, (most, error) in known.items() if error is not None)
