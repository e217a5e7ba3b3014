"""From --label to the number of a class, by its name or by the number itself; from --labels to how many there are."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from bsi.errors import UsageError

if TYPE_CHECKING:
    from bsi.model import Model

__all__ = ["all_labels", "label_of"]

SHOWN_NAMES = 12  # of classes, in a message


def all_labels(model: Model, run: object) -> int:
    """How many classes there are, where all are asked for in turn."""
    if not model.classes:
        raise UsageError(f"{run} was trained without labels: leave --labels out, or train it with --data.labels")
    return model.classes


def label_of(model: Model, label: str | None) -> int | None:
    """The number of the class that is asked for. A name comes first: classes may be called 1, 2, 3."""
    if label is None:
        return None
    if model.classes == 0:
        raise UsageError(
            f"this network has no label {label!r}: it was trained without labels. Leave --label out, or train one "
            f"that has them: bsi train RECIPE --data.labels"
        )
    names = model.class_names
    if label in names:
        return names.index(label)
    try:
        number = int(label)
    except ValueError:
        raise UsageError(f"this network has no label {label!r}: {_near(label, names)}") from None
    if number < 0 or (model.classes is not None and number >= model.classes):
        known = "from 0 on" if model.classes is None else f"0 to {model.classes - 1}"
        raise UsageError(f"this network has no label {number}: its labels are {known}")
    return number


def _near(label: str, names: tuple[str, ...]) -> str:
    """What may have been meant by a name that is none."""
    if not names:
        return "its labels are numbers, they have no names"
    folded = {name.casefold(): name for name in names}
    near = difflib.get_close_matches(label.casefold(), folded, 1)
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"did you mean {folded[near[0]]!r}?" if near else f"there are {', '.join(names[:SHOWN_NAMES])}{more}"
