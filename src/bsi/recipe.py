"""`Recipe`: all settings of a training run in one frozen record of JSON-serializable values. Imports no torch.

A recipe determines the result: the method, the network, the data, the optimizer, the averages and the seed. A run
folder stores it, a resumed run is compared with it, and the command line edits it. Numbers from the paper are in
`bsi.recipes`; the defaults here are ours unless a comment says otherwise.

A record is stored as a dictionary of its fields. If a field may hold one of several records (the method, the network),
the dictionary has a `kind`, a name from `kinds()`. Other names are rejected, and nothing is imported by a name read
from a file. Reading is strict: an unknown field, a missing field or a value of another type raises an error.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from bsi.backbones.config import AutoencoderConfig, BackboneConfig, DiTConfig, MLPConfig, UNetConfig
from bsi.backbones.costs import Parallel
from bsi.devices import Precision
from bsi.errors import UsageError
from bsi.methods import METHODS, Method
from bsi.methods.base import Parametrization
from bsi.sampler import Sampler
from bsi.values import CONTINUOUS, KINDS

SHARDS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST = 10**12  # steps, samples in a batch: larger numbers are mistakes
FIRST_RATE = 1e-8  # the paper's warm-up starts here

Action = Literal["journal", "evaluate", "sample", "checkpoint"]
Record = TypeVar("Record")

NETWORKS: dict[str, type] = {"dit": DiTConfig, "unet": UNetConfig, "mlp": MLPConfig, "autoencoder": AutoencoderConfig}
# Fields that version 0.1.0 wrote under other names.
FORMER = {
    "optimiser": "optimizer",
    "parametrisation": "parametrization",
    "unlabelled": "unlabeled",
    "standard": "standardize",
}


@dataclass(frozen=True)
class Data:
    """A prepared dataset (its name, or the path of its folder), and how its samples are loaded."""

    name: str
    flips: bool = False
    """Mirror each image with probability one half."""
    labels: bool = False
    """Train with the data's labels, so that samples of a class can be drawn."""
    unlabeled: float = 0.1
    """With labels, the share of samples whose label is hidden: bounds and guidance need unconditional predictions."""
    windows: bool = False
    """Begin a sample at any symbol of a text, not at multiples of its length. For data whose samples, of shape
    (length,), are consecutive pieces of one series."""
    workers: int = 0
    """Threads that fetch the samples of a Dataset; the order does not depend on their number."""

    def __post_init__(self) -> None:
        _at_least(self, "data.", workers=0)
        _require("data.windows", self.windows, not (self.windows and self.labels), "off for data with labels")
        _require("data.unlabeled", self.unlabeled, 0 < self.unlabeled < 1, "between 0 and 1")


@dataclass(frozen=True)
class Objective:
    """The training loss: 2 L_M / n, by default of infinitely many measurements and with the ELBO's weights."""

    finite_k: int | None = None
    """Minimize L_M^k instead, of this many measurements on the paper's grid."""
    weight: Literal["elbo", "sigmoid", "edm", "reconstruction"] = "elbo"
    """A factor on the ELBO's weight of each level, by its signal-to-noise ratio; for an autoencoder the error of its
    reconstruction instead: see `bsi.objective`."""
    bias: float = 2.0
    """ln SNR at which the sigmoid weight is one half."""
    levels: Literal["paper", "expected"] | None = None
    """How levels are drawn: log-uniformly as in the paper, or in proportion to the expected loss (see `bsi.objective`).
    Default: paper with the ELBO's weight, expected with others."""
    consistency: bool = False
    """Tune a trained network to draw samples in few steps instead: see `bsi.distill`."""

    def __post_init__(self) -> None:
        if self.finite_k is None:
            return
        _at_least(self, "objective.", finite_k=1)
        if self.weight != "elbo" or self.levels is not None:
            got = f"got objective.weight={self.weight}, objective.levels={self.levels}, finite_k={self.finite_k}"
            raise UsageError(f"L_M^k has weights and levels of its own, {got}. Leave them or finite_k out.")

    @property
    def expected_levels(self) -> bool:
        return self.levels == "expected" or (self.levels is None and self.weight != "elbo")


@dataclass(frozen=True)
class Optimizer:
    """AdamW, or Muon together with AdamW. The rate rises linearly from 1e-8 over `warmup` steps, then stays or falls to
    `final_lr` by a cosine."""

    lr: float
    kind: Literal["adamw", "muon"] = "adamw"
    """muon updates the matrices inside a network, and AdamW the other parameters."""
    momentum: float = 0.95
    """Momentum of Muon."""
    beta_1: float = 0.9
    beta_2: float = 0.999
    weight_decay: float = 1e-2
    warmup: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr: float = 0.0
    """The learning rate at the last step of the cosine schedule."""
    clip: float = 1.0
    """Largest norm of the gradient; inf does not clip."""

    def __post_init__(self) -> None:
        _at_least(self, "optimizer.", warmup=0)
        for name in ("lr", "clip"):
            _require(f"optimizer.{name}", getattr(self, name), getattr(self, name) > 0, "positive")
        for name in ("momentum", "beta_1", "beta_2"):
            _require(f"optimizer.{name}", getattr(self, name), 0 <= getattr(self, name) < 1, "in [0, 1)")
        _require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        _require("optimizer.final_lr", self.final_lr, 0 <= self.final_lr <= self.lr, f"in 0 .. lr={self.lr}")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of the next update after `step` completed updates, out of `steps` in total."""
        if step < self.warmup:
            return FIRST_RATE + (self.lr - FIRST_RATE) * step / self.warmup
        if self.schedule == "constant":
            return self.lr
        along = min(1.0, (step - self.warmup) / max(1, steps - 1 - self.warmup))
        return self.final_lr + (self.lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * along))


@dataclass(frozen=True)
class Ema:
    """The moving average of the weights: equal to them up to step `start`, then beta ema + (1 - beta) weights."""

    beta: float = 0.9999
    start: int = 1000
    powers: tuple[float, ...] = ()
    """Relative widths of further, power-function averages, e.g. 0.05 0.1; any other width is a mix of two."""
    snapshot: int = 1000
    """Steps between two stored power-function averages."""

    def __post_init__(self) -> None:
        _at_least(self, "ema.", start=0, snapshot=1)
        _require("ema.beta", self.beta, 0 <= self.beta < 1, "in [0, 1); the paper uses 0.9999")
        fits = all(0 < width < 0.288 for width in self.powers)
        _require("ema.powers", self.powers, fits, "relative widths between 0 and 0.288, such as 0.05 0.1")

    def weight(self, step: int) -> float:
        """The factor of the weights in the update of the average after `step` updates; 1 replaces the average."""
        return 1.0 if step <= self.start else 1 - self.beta

    def stores(self, step: int, last: int) -> bool:
        """Whether the power-function averages are stored when `step` steps are done of `last`."""
        return bool(self.powers) and (step % self.snapshot == 0 or step == last)


@dataclass(frozen=True)
class Every:
    """Intervals in steps; 0 means never (not allowed for the journal)."""

    journal: int = 50
    evaluate: int = 0
    sample: int = 0
    checkpoint: int = 1000

    def __post_init__(self) -> None:
        _at_least(self, "every.", journal=1, evaluate=0, sample=0, checkpoint=0)

    def due(self, step: int, last: int) -> set[Action]:
        """The actions due after `step` of `last` steps: at multiples of an interval, and at the end unless it is 0.

        The last step always has a checkpoint.
        """
        intervals: dict[Action, int] = asdict(self)  # type: ignore[assignment]
        found = {name for name, every in intervals.items() if every and (step % every == 0 or step == last)}
        return found | {"checkpoint"} if step == last else found


@dataclass(frozen=True)
class Evaluation:
    """The bound of `images` random test samples under the EMA, with `measure` levels and `recon` reconstructions.

    If there are fewer test samples, each has proportionally more levels and reconstructions.
    """

    images: int = 1024
    measure: int = 2
    recon: int = 2
    batch: int = 256
    """Samples evaluated at a time."""

    def __post_init__(self) -> None:
        _at_least(self, "evaluation.", images=1, measure=2, recon=2, batch=1)


@dataclass(frozen=True)
class Samples:
    """The grid of samples that is drawn during training, with the EMA."""

    count: int = 64
    sampler: Sampler = field(default_factory=Sampler)

    def __post_init__(self) -> None:
        _at_least(self, "samples.", count=1)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept: the last few, and permanently those at multiples of `every` (0: none)."""

    last: int = 2
    every: int = 0
    background: bool = True
    """Write while the next steps run; the state is first copied into host memory."""

    def __post_init__(self) -> None:
        _at_least(self, "keep.", last=1, every=0)


@dataclass(frozen=True)
class Recipe:
    """A complete training run. `backbone=None` stands for a network that the caller passes."""

    name: str
    method: Method
    backbone: BackboneConfig | None
    data: Data
    steps: int
    batch: int
    """Samples per step over all ranks and accumulation steps."""
    optimizer: Optimizer
    objective: Objective = field(default_factory=Objective)
    accumulation: int = 1
    """Number of pieces in which a rank computes its part of a batch."""
    virtual_shards: int = SHARDS
    """The largest number of shards that a batch is divided into: ranks take whole shards, so that what is drawn for a
    shard does not depend on the number of ranks. See `shards`."""
    ema: Ema = field(default_factory=Ema)
    precision: Precision = "auto"
    """Precision inside the network; auto is bf16 on a GPU, float16 on a GPU without bf16, and float32 on a CPU."""
    compile: bool = True
    """On a GPU, use the fastest form of the network: fused if it has one, else compiled. Ignored on a CPU."""
    parallel: Parallel = "ddp"
    """How ranks share the network: ddp copies it to each, fsdp shards the weights, the optimizer's state and the
    averages over all ranks, and hsdp over the ranks of each host."""
    lean: bool = False
    """A fused form that stores less: up to a tenth slower, with 3/4 of a DiT's memory or half of a U-Net's."""
    parametrization: Parametrization | None = None
    """What the network predicts; by default that of the method."""
    sigma_data: float = 1.0
    """Standard deviation of the data in the preconditioning (paper: 1)."""
    seed: int = 0
    threads: int | None = None
    """Threads of a rank on a CPU; by default torch decides. Another number may round sums differently."""
    audit: bool = False
    """Compute shard by shard, in float32 and a fixed order: the same bits for any number of ranks, but slower."""
    every: Every = field(default_factory=Every)
    evaluation: Evaluation = field(default_factory=Evaluation)
    samples: Samples = field(default_factory=Samples)
    keep: Keep = field(default_factory=Keep)

    def __post_init__(self) -> None:
        check_name(self.name)
        if isinstance(self.backbone, str):
            fix = f"Use bsi.backbones.resolve({self.backbone!r})."
            raise UsageError(f"backbone must be a config, got {self.backbone!r}. {fix}")
        for name in ("steps", "batch", "accumulation", "virtual_shards"):
            _at_least(self, "", **{name: 1})
            _require(name, getattr(self, name), getattr(self, name) <= MOST, f"at most {MOST}")
        if self.threads is not None:
            _at_least(self, "", threads=1)
        _require("seed", self.seed, 0 <= self.seed < 2**63, "in 0 .. 2**63 - 1")
        _require("sigma_data", self.sigma_data, self.sigma_data > 0, "positive")
        if self.audit:
            power = 2 ** (self.virtual_shards.bit_length() - 1)
            fits = self.virtual_shards == power
            _require("virtual_shards", self.virtual_shards, fits, f"a power of two in the audit mode, such as {power}")
            _require("precision", self.precision, self.precision in ("auto", "float32"), "float32 in the audit mode")
        if self.parallel != "ddp":
            _require("precision", self.precision, self.precision != "fp8", "bf16 with parallel=fsdp or hsdp")
            _require("lean", self.lean, not self.lean, "off with parallel=fsdp or hsdp. Use backbone.checkpoint")
            whole = isinstance(self.backbone, AutoencoderConfig)
            _require("parallel", self.parallel, not whole, "ddp for an autoencoder, which is small")
        if self.precision == "fp8":
            _require("lean", self.lean, not self.lean, "off with precision fp8, which already stores few activations")
            _require("compile", self.compile, self.compile, "on with precision fp8")
        coder = isinstance(self.backbone, AutoencoderConfig)
        for name, value in (("objective.weight", self.objective.weight), ("parametrization", self.parametrization)):
            rule = "reconstruction, as in the recipe autoencoder-f4" if coder else "that of a recipe such as folder"
            _require(name, value, coder == (value == "reconstruction"), f"{rule}, for this kind of network")
        if coder:
            _require("every.sample", self.every.sample, self.every.sample == 0, "0: an autoencoder draws no samples")
        if coder or self.objective.consistency:
            rule = "0: an autoencoder or a consistency function has no bound"
            _require("every.evaluate", self.every.evaluate, self.every.evaluate == 0, rule)
        if self.objective.consistency:
            own = self.objective == Objective(consistency=True)
            _require("objective", self.objective, own, "either consistency or a bound's")

    @property
    def shards(self) -> int:
        """The number of virtual shards: the largest divisor of the batch up to `virtual_shards`.

        In the audit mode it is a power of two. A rank computes consecutive shards.
        """
        if self.audit or self.batch % self.virtual_shards == 0:
            return math.gcd(self.batch, self.virtual_shards)
        return max(n for n in range(1, min(self.batch, self.virtual_shards) + 1) if self.batch % n == 0)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold parts of the network; in the audit mode each holds all of it."""
        return self.parallel != "ddp" and not self.audit

    def check(self, world: int) -> None:
        """Raise if `world` ranks cannot share a batch evenly."""
        for what, count, shared in (
            ("ranks", world, self.shards),
            ("accumulation steps", self.accumulation, self.shards // world),
        ):
            if shared % count:
                fit = ", ".join(str(n) for n in range(1, shared + 1) if shared % n == 0)
                shards = f"{shared} of the {self.shards} virtual shards of a batch of {self.batch}"
                raise UsageError(f"{count} {what} cannot share {shards} evenly. Use {fit} {what}, or another --batch.")

    def shortened(self, steps: int) -> Recipe:
        """The recipe with this number of steps, and a warm-up and moving average scaled to it if it is smaller.

        A constant schedule can be extended later, so its settings do not depend on the number of steps.
        """
        share, other = steps / self.steps, replace(self, steps=steps)
        if share >= 1 or self.optimizer.schedule == "constant":
            return other
        warmup, start = round(share * self.optimizer.warmup), round(share * self.ema.start)
        ema = replace(self.ema, start=start, beta=max(0.0, 1 - (1 - self.ema.beta) / share))
        return replace(other, optimizer=replace(self.optimizer, warmup=warmup), ema=ema)

    def rate(self, step: int) -> float:
        """The learning rate of the next update after `step` completed updates."""
        return self.optimizer.rate(step, self.steps)


def check_name(name: str) -> None:
    """Raise for a name, which may come from a file, that could not name a run folder or an export."""
    if not NAME.fullmatch(name):
        allowed = "1 to 100 letters, digits, '-', '_' or '.', the first a letter or digit"
        raise UsageError(f"name must have {allowed}, got {name!r:.120}. Choose another.")


def _at_least(record: object, prefix: str, **least: int) -> None:
    """Raise if a field of the record is smaller than its given minimum."""
    for name, smallest in least.items():
        value = getattr(record, name)
        _require(f"{prefix}{name}", value, value >= smallest, f"at least {smallest}")


def _require(name: str, value: object, valid: bool, rule: str) -> None:
    if not valid:
        raise UsageError(f"{name} must be {rule}, got {value}.")


# ---- Records as JSON-serializable data -------------------------------------------------------------------------------


def kinds() -> dict[str, type]:
    """The registered methods, the networks and the kinds of data, by the name that a file may give them."""
    return {**METHODS, **NETWORKS, **KINDS}


def to_plain(value: Any) -> Any:
    """Convert a record to dictionaries, lists, numbers and strings."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = next(({"kind": name} for name, cls in kinds().items() if cls is type(value)), {})
        return {**kind, **{f.name: to_plain(getattr(value, f.name)) for f in fields(value)}}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value


def from_plain(cls: type[Record], data: object, where: str = "") -> Record:
    """Convert `data` to a record of class `cls`. Raises a UsageError that names an invalid field."""
    if not isinstance(data, dict):
        raise UsageError(f"{where or cls.__name__} must be a table of fields: got {data!r:.80}")
    hints, known = typing.get_type_hints(cls), {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    given = {FORMER.get(str(name), str(name)): value for name, value in data.items() if name != "kind" or name in known}
    # Version 0.1.0 wrote a sampler's fields in the record that holds it, and the kind of data in two fields.
    if "sampler" in known and "sampler" not in given:
        sampler = {name: given.pop(name) for name in ("steps", "solver", "grid") if name in given}
        given |= {"sampler": sampler} if sampler else {}
    if "kind" in known and "bins" in given:
        former = {name: given.pop(name, None) for name in ("bins", "standardize")}
        given["kind"] = next(({"kind": name, **value} for name, value in former.items() if value), to_plain(CONTINUOUS))
    unknown = sorted(given.keys() - known.keys())
    missing = [n for n, f in known.items() if n not in given and f.default is f.default_factory is MISSING]
    if unknown or missing:
        what = f"unknown {', '.join(unknown)}" if unknown else f"missing {', '.join(missing)}"
        raise UsageError(f"{where or cls.__name__}: {what}; its fields are {', '.join(known)}")
    prefix = f"{where}." if where else ""
    return cls(**{name: _value(hints[name], value, prefix + name) for name, value in given.items()})


def _value(hint: Any, value: object, where: str) -> Any:
    """Convert `value` to the type of the annotation `hint`."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if hint is Method:
        origin, choices = typing.Union, tuple(METHODS.values())
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in choices:
            return None
        choices = tuple(choice for choice in choices if choice is not types.NoneType)
        if float in choices and len(choices) > 1:  # or a list of them
            choices = tuple(choice for choice in choices if (choice is float) != isinstance(value, list))
        if len(choices) == 1:
            return _value(choices[0], value, where)
        known = {name: cls for name, cls in kinds().items() if cls in choices}
        kind = value.get("kind") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in known:
            raise UsageError(f"{where} is of kind {', '.join(known)}: got {kind!r:.80}")
        return from_plain(known[kind], value, where)
    if is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(choices[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is Literal and isinstance(value, str) and value in choices:
        return value
    if hint is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(typing.cast(float, value))
    if hint in (int, bool, str) and type(value) is hint:
        return value
    rule = f"one of {', '.join(map(str, choices))}" if origin is Literal else "a list" if origin else hint.__name__
    raise UsageError(f"{where} must be {rule}: got {value!r:.80}")


def flat(record: object, prefix: str = "") -> dict[str, Any]:
    """A record's values by dotted name: {"optimizer.lr": 0.0002, ...}."""
    plain = to_plain(record)
    if not isinstance(plain, dict):
        return {prefix: plain}
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found |= flat(value, f"{prefix}.{name}" if prefix else name)
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
