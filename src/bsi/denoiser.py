"""From a network to a prediction of the sample: preconditioning, Equation "preconditioned model".

    f(psi, level) = c_skip psi + c_out f'(c_in psi, t),        t = F(level) in [0, 1]

The coefficients need only the encoder N(signal x, noise^2) and the data's standard
deviation. EDM's conditions (unit variance of the network's input and of its target, minimal c_out) give, with
d = signal^2 sigma_data^2 + noise^2,

    c_skip = signal sigma_data^2 / d,    c_out = noise sigma_data / sqrt(d),    c_in = 1 / sqrt(d),

which for BSI are exactly the paper's kappa formulas. The noise (epsilon) parametrization of BFN and VDM solves
psi = signal x + noise eps for x.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bsi.conditioning import guided
from bsi.errors import UsageError
from bsi.gaussian import Data, Encoder, PerSample, over
from bsi.methods.base import Method, Parametrization, Predictor, rho_at
from bsi.sampler import check_guidance
from bsi.symbols import SymbolPredictor, expected, log_posterior
from bsi.values import Symbols

IMPOSSIBLE = -1e4  # the logarithm of a probability of 0, which guidance can still subtract

# A condition of predictions: class labels, an image, or several of these by name.
Condition = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Coefficients:
    """c_skip, c_out and c_in, one of each per sample, in float64."""

    c_skip: Float[Tensor, "*batch"]
    c_out: Float[Tensor, "*batch"]
    c_in: Float[Tensor, "*batch"]


def edm(encoder: Encoder, sigma_data: float = 1.0) -> Coefficients:
    """EDM's coefficients: unit variance of the network's input and target, minimal c_out.

    At BFN's deterministic first latent (signal = noise = 0) they are the limits, but c_in = 0: so is the latent.
    """
    signal, noise = encoder.signal, encoder.noise
    d = (signal * sigma_data).square() + noise.square()
    nothing = d == 0
    d = torch.where(nothing, 1.0, d)
    return Coefficients(
        c_skip=signal * sigma_data**2 / d,
        c_out=torch.where(nothing, sigma_data, noise * sigma_data * torch.rsqrt(d)),
        c_in=torch.where(nothing, 0.0, torch.rsqrt(d)),
    )


def epsilon(encoder: Encoder, sigma_data: float = 1.0) -> Coefficients:
    """x_hat = (psi - noise eps_hat) / signal. Where the signal is 0, at the first level of BSI and BFN, x_hat is 0.

    Methods whose first level has no signal (BSI and BFN, not VDM) have a finite bound only if x_hat is clipped: an
    error of eps_hat is multiplied by noise / signal, whose mean square over the levels is infinite.
    """
    nothing = encoder.signal == 0
    signal = torch.where(nothing, 1.0, encoder.signal)
    return Coefficients(
        c_skip=torch.where(nothing, 0.0, 1 / signal),
        c_out=torch.where(nothing, 0.0, -encoder.noise / signal),
        c_in=torch.ones_like(signal),
    )


REACH = 3.0  # c_out of `blend` is at most REACH sigma_data


def blend(encoder: Encoder, sigma_data: float = 1.0) -> Coefficients:
    """Noise prediction where there is signal, bounded where there is none.

    c_skip and c_out are EDM's for data REACH times as broad: for rho >> 1 / REACH those of `epsilon` up to the sign of
    c_out, for rho -> 0 they tend to 0 and REACH sigma_data. c_in is EDM's. The bound is finite without clipping.
    """
    broad = edm(encoder, REACH * sigma_data)
    return Coefficients(broad.c_skip, broad.c_out, edm(encoder, sigma_data).c_in)


def reconstruction(encoder: Encoder, sigma_data: float = 1.0) -> Coefficients:
    """x_hat is the output, and the latent the input: the network is an autoencoder, called on images themselves."""
    return Coefficients(
        torch.zeros_like(encoder.signal), torch.ones_like(encoder.signal), torch.ones_like(encoder.signal)
    )


Preconditioning = Callable[[Encoder, float], Coefficients]
COEFFICIENTS: dict[Parametrization, Preconditioning] = {
    "edm": edm, "epsilon": epsilon, "blend": blend, "reconstruction": reconstruction,
}  # fmt: skip


def consistent(coefficients: Coefficients, method: Method, level: Float[Tensor, "*batch"]) -> Coefficients:
    """Those of f = x_hat + m (psi / signal - x_hat), m = (rho / rho_last)^2: the identity at the last level."""
    last = rho_at(method, torch.tensor(method.levels.high, dtype=torch.float64, device=level.device))
    signal, m = method.encoder(level).signal, (rho_at(method, level) / last).square()
    skip = (1 - m) * coefficients.c_skip + torch.where(m > 0, m / torch.where(m > 0, signal, 1.0), 0.0)
    return Coefficients(skip, (1 - m) * coefficients.c_out, coefficients.c_in)


class Denoiser(nn.Module):
    """f_theta: a backbone with its preconditioning. Called as `denoiser(latent, level)`, it is a Predictor.

    `clip` is the range that x_hat is clipped to, or None. With `symbols` the input are the probabilities of the symbols
    given each element's own latent, and the output is added to their logarithms: see `bsi.symbols`. `consistent` makes
    it a consistency function: see `bsi.consistency`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        method: Method,
        parametrization: Parametrization | None = None,
        sigma_data: float = 1.0,
        clip: tuple[float, float] | None = None,
        symbols: Symbols | None = None,
        consistent: bool = False,
    ) -> None:
        super().__init__()
        _check_backbone(backbone)
        self.backbone, self.method = backbone, method
        self.parametrization = parametrization or method.parametrization
        if self.parametrization not in COEFFICIENTS:
            raise UsageError(f"unknown parametrization {self.parametrization!r}. Use one of {', '.join(COEFFICIENTS)}.")
        if not sigma_data > 0:
            raise UsageError(f"sigma_data must be a positive standard deviation, got {sigma_data}")
        self.sigma_data, self.clip, self.symbols, self.consistent = sigma_data, clip, symbols, consistent

    def forward(self, latent: Data, level: PerSample, cond: Condition | None = None) -> Data:
        if self.symbols is not None:
            return expected(self.symbols, self.logits(latent, level, cond))
        coefficients = COEFFICIENTS[self.parametrization](self.method.encoder(level), self.sigma_data)
        if self.consistent:
            coefficients = consistent(coefficients, self.method, level)
        output = self._output(over(coefficients.c_in, latent) * latent, level, cond)
        x_hat = over(coefficients.c_skip, latent) * latent + over(coefficients.c_out, latent) * output
        return x_hat if self.clip is None else x_hat.clamp(*self.clip)

    def _output(self, scaled: Data, level: PerSample, cond: Condition | None) -> Data:
        """What the network returns, with autocast if its weights were converted to 16 bits."""
        arguments = (scaled, self.method.levels.cdf(level).to(scaled.dtype), *(() if cond is None else (cond,)))
        weights = self.backbone.parameters() if isinstance(self.backbone, nn.Module) else ()
        half = next((p.dtype for p in weights if p.dtype in (torch.float16, torch.bfloat16)), None)
        with nullcontext() if half is None else torch.autocast(scaled.device.type, half):
            output = self.backbone(*arguments)
        if output.shape != scaled.shape:
            got = f"{tuple(output.shape)} for an input of {tuple(scaled.shape)}"
            raise UsageError(f"the backbone must return the shape of its input, one value per value: got {got}")
        return output.to(scaled.dtype)

    def logits(self, latent: Data, level: PerSample, cond: Condition | None = None, known: Data | None = None) -> Data:
        """The logarithms of the predicted probabilities of symbols, up to a constant for each element.

        `known` are embedded symbols that are known exactly, and NaN elsewhere.
        """
        assert self.symbols is not None
        log_p = log_posterior(self.symbols, self.method.encoder(level), latent)
        if known is not None:
            log_p = torch.where(known.isnan(), log_p, torch.where(known > 0, 0.0, IMPOSSIBLE))
        # Unit variance if a symbol is certain and all are equally frequent.
        scaled = (self.symbols.count * log_p.exp() - 1) / math.sqrt(self.symbols.count - 1)
        return log_p + self._output(scaled, level, cond)

    def given(self, cond: Condition | None, guidance: float = 1.0, known: Data | None = None) -> Predictor:
        """This denoiser as a predictor with a fixed condition and the symbols that are `known`, see `logits`.

        A `guidance` other than 1 scales the change that the condition makes to the prediction, or to the logits of
        symbols, and takes twice the evaluations.
        """
        check_guidance(guidance)
        if self.parametrization == "reconstruction":
            raise UsageError(
                "this network is an autoencoder: it draws no samples and has no bound. Encode a dataset with `bsi data "
                "latents --from DATASET --autoencoder RUN`, and train a model on it."
            )
        if cond is None and guidance != 1:
            raise UsageError(f"guidance needs a condition to follow, such as a label, got guidance={guidance:g}.")
        if cond is None and self.symbols is None:
            return cast(Predictor, self)
        outputs = self if self.symbols is None else partial(self.logits, known=known)
        predict: Predictor = partial(outputs, cond=cond)
        if guidance != 1:
            predict = guided(predict, partial(outputs, cond=None), guidance)
        return predict if self.symbols is None else SymbolPredictor(self.symbols, predict)


def _check_backbone(backbone: object) -> None:
    """Raise unless the network is callable and accepts the arguments it will be called with."""
    if isinstance(backbone, type):
        name = backbone.__name__
        raise UsageError(f"a network must be an object, not its class: got {name}. Pass {name}(...).")
    if not callable(backbone):
        raise UsageError(f"a network must be a torch module, got {backbone!r}. Use bsi.backbones.build(name, shape).")
    try:
        takes = inspect.signature(backbone.forward if isinstance(backbone, nn.Module) else backbone)
    except (TypeError, ValueError):  # not written in Python
        return
    for arguments in (("input", "t"), ("input", "t", "cond")):
        with suppress(TypeError):
            takes.bind(*arguments)
            return
    raise UsageError(
        f"a network is called as network(input, t), or network(input, t, cond) with a condition: got "
        f"{type(backbone).__name__}, whose forward is {takes}. Give it a forward(self, input, t), where t in [0, 1] is "
        f"the time of each sample; it may ignore t."
    )


def check_condition(cond: Condition | None, num: int, classes: int | None = None) -> None:
    """Raise unless each condition is a tensor with one row for each of `num` samples, and labels are in range.

    Label `classes`, one past the last, stands for no label. On a GPU the embedding would fail with an assertion.
    """
    named = cond if isinstance(cond, dict) else {} if cond is None else {"cond": cond}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise UsageError(
                f"a condition must be a torch.Tensor or a dict of them, got a {type(value).__name__} as {name}. Labels "
                f"are numbers, one for each sample: torch.tensor([0, 1, ...])."
            )
        if value.ndim == 0 or len(value) != num:
            got = f"one number as {name}" if value.ndim == 0 else f"{len(value)} rows of {name}"
            raise UsageError(
                f"a condition needs one row per sample, got {got} for {num} samples. Use {name}.expand({num}) for one "
                f"that all share."
            )
    if isinstance(cond, Tensor) and classes and not cond.is_floating_point():
        low, high = int(cond.min()), int(cond.max())
        if low < 0 or high > classes:
            raise UsageError(f"this network has labels 0 to {classes - 1}, got {low if low < 0 else high}.")
