"""Records as JSON-serializable data, and back.

A record becomes a dictionary of its fields. If a field may hold one of several records (the method, the network), the
dictionary has a `kind`, a name from `kinds()`. Other names are rejected, and nothing is imported by a name read from a
file. Reading is strict: an unknown field, a missing field or a value of another type raises an error that names it.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from bsi.backbones.config import DiTConfig, MLPConfig, UNetConfig
from bsi.errors import UsageError
from bsi.methods import METHODS, Method
from bsi.values import CONTINUOUS, Bins, Standardize, Symbols

NETWORKS: dict[str, type] = {"dit": DiTConfig, "unet": UNetConfig, "mlp": MLPConfig}
DATA_KINDS: dict[str, type] = {"bins": Bins, "symbols": Symbols, "standardize": Standardize}

# Fields that version 0.1.0 wrote under other names.
FORMER = {
    "optimiser": "optimizer",
    "parametrisation": "parametrization",
    "unlabelled": "unlabeled",
    "standard": "standardize",
}

Record = TypeVar("Record")


def kinds() -> dict[str, type]:
    """The registered methods, the networks and the kinds of data, by the name that a file may give them."""
    return {**METHODS, **NETWORKS, **DATA_KINDS}


def to_plain(value: Any) -> Any:
    """Convert a record to dictionaries, lists, numbers and strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = next(({"kind": name} for name, cls in kinds().items() if cls is type(value)), {})
        return {**kind, **{f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def from_plain(cls: type[Record], data: object, where: str = "") -> Record:
    """Convert `data` to a record of class `cls`. Raises a UsageError that names an invalid field."""
    if not isinstance(data, dict):
        raise UsageError(f"{where or cls.__name__} must be a table of fields: got {data!r:.80}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    given = _in_current_form({str(name): value for name, value in data.items()}, fields.keys())
    unknown = sorted(given.keys() - fields.keys())
    missing = [
        name for name, f in fields.items()
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]  # fmt: skip
    if unknown or missing:
        what = f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
        raise UsageError(f"{where or cls.__name__}: {what}; its fields are {', '.join(fields)}")
    prefix = f"{where}." if where else ""
    return cls(**{name: _value(hints[name], value, prefix + name) for name, value in given.items()})


def _in_current_form(data: dict[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The values by the current names of their fields; version 0.1.0 wrote some records in another form."""
    given = {FORMER.get(name, name): value for name, value in data.items() if name != "kind" or "kind" in fields}
    if "sampler" in fields and "sampler" not in given:  # its fields were those of the record that holds it
        moved = {name: given.pop(name) for name in ("steps", "solver", "grid") if name in given}
        given |= {"sampler": moved} if moved else {}
    if "kind" in fields and "bins" in given:
        former = {name: given.pop(name, None) for name in ("bins", "standardize")}
        given["kind"] = next(({"kind": name, **value} for name, value in former.items() if value), to_plain(CONTINUOUS))
    return given


def _value(hint: Any, value: object, where: str) -> Any:
    """Convert `value` to the type of the annotation `hint`."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in choices and isinstance(value, str):
            return value
        raise UsageError(f"{where} is one of {', '.join(map(str, choices))}: got {value!r:.80}")
    if origin in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        rest = tuple(choice for choice in choices if choice is not type(None))
        if float in rest and len(rest) == 2:  # or a list of them
            rest = (float,) if isinstance(value, int | float | str) else rest[1:]
        return _value(rest[0], value, where) if len(rest) == 1 else _one_of(rest, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise UsageError(f"{where} must be a list: got {value!r:.80}")
        return tuple(_value(choices[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if hint is Method:
        return _one_of(tuple(METHODS.values()), value, where)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is float and value in ("inf", "-inf", "nan"):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise UsageError(f"{where} must be {getattr(hint, '__name__', hint)}: got {value!r:.80}")


def _one_of(classes: tuple[Any, ...], value: object, where: str) -> Any:
    """The record of the kind named by `value`, which must be one of `classes`."""
    known = {name: cls for name, cls in kinds().items() if cls in classes}
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in known:
        raise UsageError(f"{where} is of kind {', '.join(known)}: got {kind!r:.80}")
    return from_plain(known[kind], value, where)


def flat(record: object) -> dict[str, Any]:
    """A record's values by dotted name: {"optimizer.lr": 0.0002, ...}."""
    found: dict[str, Any] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                collect(f"{prefix}.{name}" if prefix else name, inner)
        else:
            found[prefix] = value

    collect("", to_plain(record))
    return found


@dataclass(frozen=True)
class Change:
    """A value that differs between two records, by its dotted name; None where a record has no such field."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def changes(before: object, after: object) -> list[Change]:
    """The differences between two records, in the order of their fields."""
    old, new = flat(before), flat(after)
    return [Change(name, old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)]
