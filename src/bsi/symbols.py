"""Predictions and likelihoods of symbols: a categorical distribution for each element of a sample.

Symbol k of K is embedded as e_k (see `bsi.Symbols`), and the encoder, the belief, the levels and the solvers act on the
embedded sample. Under the frequencies pi of the symbols, the posterior of an element given its own latent psi alone is

    p(k | psi, level) ~ pi_k N(psi; signal e_k, noise^2) ~ pi_k exp(signal / noise^2 <psi, e_k>).

The network reads these probabilities, and its output is added to their logarithms:

    logits = ln p(k | psi, level) + network,        x_hat = sum_k softmax(logits)_k e_k.

A network that returns 0, as ours do before training, is the best predictor for independent elements. Since the latent
enters through the posterior only, a symbol that is known exactly is one whose posterior is certain, which is how
`Model.inpaint` conditions on it.

The decoder is the network's distribution at the last level: L_R = -ln p(x | psi). For finitely many steps the
transition is the mixture over symbols, p(s' | s) = sum_k p_k N(s + D e_k, D) for each element, as in Bayesian Flow
Networks. Its divergence from the posterior N(s + D e_x, D) is estimated from one draw eps of the noise of the step,
with d_k = e_x - e_k:

    KL = E -ln sum_k p_k exp( -sqrt(D) <d_k, eps> - D |d_k|^2 / 2 ).

For D -> 0 it is D |e_x - x_hat|^2 / 2, the term of all methods, and it never exceeds -ln p_x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from bsi.gaussian import Encoder, PerSample, over, sum_over_data
from bsi.rng import Noise
from bsi.values import EMBEDDING, Symbols

Data = Float[Tensor, "batch *latent"]
Probabilities = Float[Tensor, "batch channels symbols *space"]


def grouped(symbols: Symbols, x: Data) -> Probabilities:
    """The K numbers of each element along an axis of their own."""
    return x.unflatten(1, (-1, symbols.count))


@functools.lru_cache(maxsize=64)
def _log_prior(symbols: Symbols, axes: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    prior = symbols.prior or (1 / symbols.count,) * symbols.count
    return torch.tensor(prior, dtype=torch.float64).log().to(device, dtype).view(-1, *[1] * axes)


def evidence(encoder: Encoder, latent: Data) -> Data:
    """ln p(psi | k) of each element's own latent, up to a number that all symbols of the element share."""
    known = encoder.noise > 0
    gain = torch.where(known, encoder.signal / torch.where(known, encoder.noise, 1.0).square(), 0.0)
    return over(EMBEDDING * gain, latent) * latent


def log_posterior(symbols: Symbols, encoder: Encoder, latent: Data) -> Data:
    """ln p(k | psi, level) of each element given its own latent."""
    prior = _log_prior(symbols, latent.ndim - 2, latent.device, latent.dtype)
    return torch.log_softmax(grouped(symbols, evidence(encoder, latent)) + prior, 2).flatten(1, 2)


def expected(symbols: Symbols, logits: Data) -> Data:
    """x_hat = sum_k p_k e_k, p the softmax over the symbols of each element."""
    return EMBEDDING * (torch.softmax(grouped(symbols, logits), 2).flatten(1, 2) - 1 / symbols.count)


def beliefs(symbols: Symbols, encoder: Encoder, latent: Data, x_hat: Data) -> tuple[Probabilities, Probabilities]:
    """The probabilities of each element's symbols: given its own latent, and as the network predicts."""
    own = log_posterior(symbols, encoder, latent).exp()
    return grouped(symbols, own), grouped(symbols, x_hat / EMBEDDING + 1 / symbols.count)


def shades(probabilities: Probabilities) -> Float[Tensor, "batch channels *space"]:
    """The expected symbol on a scale from 0 to 1: for two symbols, the probability of the second."""
    count = probabilities.shape[2]
    scale = torch.linspace(0, 1, count, device=probabilities.device, dtype=probabilities.dtype)
    return (probabilities * scale.view(-1, *[1] * (probabilities.ndim - 3))).sum(2)


def most_probable(probabilities: Float[Tensor, "batch 1 symbols length"]) -> Float[Tensor, "batch 2 length"]:
    """The most probable symbol of each position of a text, and its probability."""
    best = probabilities[:, 0].max(1)
    return torch.stack([best.indices.to(best.values), best.values], 1)


def alphabet(symbols: Symbols) -> tuple[str, ...]:
    """One visible character, or a space, for each symbol."""
    names = symbols.names or tuple(chr(i) if symbols.count == 256 else str(i) for i in range(symbols.count))
    return tuple("↵" if name == "\n" else name if name.isprintable() else "·" for name in names)


def log_prob(symbols: Symbols, index: Integer[Tensor, "batch *data"], logits: Data) -> PerSample:
    """ln p(x) of each sample under a categorical distribution for each element, in float64."""
    log_p = torch.log_softmax(grouped(symbols, logits.double()), 2)
    return sum_over_data(log_p.gather(2, index.long().reshape(log_p[:, :, :1].shape)))


def mixture_kl(symbols: Symbols, x: Data, logits: Data, gained: PerSample, eps: Data) -> PerSample:
    """An unbiased estimate of KL( q(s' | s, x) || sum_k p_k N(s + D e_k, D) ), in nats.

    It is the average over the noise and its negative: the terms of odd order in sqrt(D), which dominate for small steps
    and have mean 0, cancel.
    """
    log_p = torch.log_softmax(grouped(symbols, logits.double()), 2)
    d = over(gained.double(), log_p)
    eps, own = grouped(symbols, eps.double()), grouped(symbols, x).double() > 0  # a symbol's own number is positive
    along = EMBEDDING * ((eps * own).sum(2, keepdim=True) - eps)  # <e_x - e_k, eps>
    distance = torch.where(own, 0.0, 2 * EMBEDDING**2)
    settled, change = log_p - 0.5 * d * distance, d.sqrt() * along
    return -0.5 * sum_over_data(torch.logsumexp(settled + change, 2) + torch.logsumexp(settled - change, 2))


def known_symbols(symbols: Symbols, x: Data, mask: Shaped[Tensor, "batch *data"]) -> Data:
    """The embedded symbols where the mask is 1, and NaN elsewhere."""
    where = (mask[:, None] if mask.ndim < 3 else mask).bool()[:, :, None]
    return torch.where(where, grouped(symbols, x), torch.nan).flatten(1, 2)


@dataclass(frozen=True)
class SymbolPredictor:
    """A predictor from a function (latent, level) -> logits."""

    symbols: Symbols
    logits: Callable[[Data, PerSample], Data]

    def __call__(self, latent: Data, level: PerSample) -> Data:
        return expected(self.symbols, self.logits(latent, level))


def drawn(predict: SymbolPredictor, noise: Noise) -> SymbolPredictor:
    """A predictor that draws each symbol from its predicted distribution instead of averaging over it.

    With the solver `posterior` its samples follow the mixture transition, as in Bayesian Flow Networks.
    """
    calls = 0

    def logits(latent: Data, level: PerSample) -> Data:
        nonlocal calls
        calls += 1
        gumbel = -torch.log(-torch.special.log_ndtr(noise(float(calls - 1), float(calls))))
        best = grouped(predict.symbols, predict.logits(latent, level) + gumbel)
        one_hot = torch.zeros_like(best).scatter(2, best.argmax(2, keepdim=True), 1.0)
        return torch.where(one_hot > 0, 0.0, -math.inf).flatten(1, 2)

    return SymbolPredictor(predict.symbols, logits)
