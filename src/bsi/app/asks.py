"""What a page may ask for, as records: everything is typed here and bounded by `Limits` before any work begins."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float32, UInt8
from pydantic import BaseModel, ConfigDict, Field

from bsi.errors import UsageError

__all__ = ["Ask", "Denoise", "Draw", "Inpaint", "Limits"]

MOST_SAMPLES = 64
MOST_VALUES = 1 << 16  # samples times dimensions of one step: a quarter of a megabyte for each of its three images
MOST_GUIDANCE = 10.0
MOST_EVALUATIONS = 128  # so that a history of all steps stays near 100 megabytes in the browser


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for, for data of one shape."""

    num: int
    evaluations: int
    body: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Limits:
        n = math.prod(shape)
        # a body holds an image in base64 of float32, a mask in base64 of bytes, and a few names and numbers
        return cls(max(1, min(MOST_SAMPLES, MOST_VALUES // n)), MOST_EVALUATIONS, 2048 + 8 * n)

    def check(self, ask: Ask) -> None:
        if not 1 <= ask.num <= self.num:
            raise UsageError(f"this page draws 1 to {self.num} images at a time: got {ask.num}. Use `bsi sample`.")
        if not 2 <= ask.evaluations <= self.evaluations:
            raise UsageError(f"this page evaluates the network 2 to {self.evaluations} times: got {ask.evaluations}")


class _Sampling(BaseModel):
    """How to sample; the same for everything that is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    seed: int = Field(ge=0, lt=2**53)  # what JavaScript holds exactly
    num: int
    evaluations: int
    solver: str = Field(max_length=32)
    grid: str = Field(max_length=32)
    label: int | None = None
    guidance: float = Field(default=1.0, ge=0, le=MOST_GUIDANCE)


class Draw(_Sampling):
    """Images from nothing."""

    kind: Literal["draw"]


class Denoise(_Sampling):
    """Images that a measurement of `image` with this precision might be of."""

    kind: Literal["denoise"]
    image: str
    precision: float = Field(gt=0)


class Inpaint(_Sampling):
    """Images that look like `image` wherever `hidden` is 0: one byte for each pixel, row by row."""

    kind: Literal["inpaint"]
    image: str
    hidden: str


Ask = Annotated[Draw | Denoise | Inpaint, Field(discriminator="kind")]


def values(encoded: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "*shape"]:
    """Values of one image from base64 of little-endian float32."""
    x = np.frombuffer(_bytes(encoded, 4 * math.prod(shape), "an image"), "<f4").reshape(shape)
    if not np.isfinite(x).all():
        raise UsageError("an image holds finite values: got NaN or infinity")
    return x


def mask(encoded: str, height: int, width: int) -> UInt8[np.ndarray, "height width"]:
    """One byte for each pixel from base64."""
    return np.frombuffer(_bytes(encoded, height * width, "a mask"), np.uint8).reshape(height, width)


def _bytes(encoded: str, expected: int, what: str) -> bytes:
    try:
        found = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{what} is sent as base64: {error}") from error
    if len(found) != expected:
        raise UsageError(f"{what} has {expected} bytes here: got {len(found)}")
    return found
