"""Requests of the page as typed records, and the limits that hold before any work begins."""

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

MAX_SAMPLES = 64
MAX_VALUES = 1 << 16  # samples times dimensions: 256 KiB for each of the three images of a step
MAX_EVALUATIONS = 128  # the browser keeps all steps, at most about 100 MB
MAX_GUIDANCE = 10.0


@dataclass(frozen=True)
class Limits:
    """The largest request for data of one shape: samples, network evaluations, bytes of the request's body."""

    num: int
    evaluations: int
    body: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Limits:
        n = math.prod(shape)
        # A body holds an image (base64 of float32), a mask (base64 of bytes) and a few names and numbers.
        return cls(max(1, min(MAX_SAMPLES, MAX_VALUES // n)), MAX_EVALUATIONS, 2048 + 8 * n)

    def check(self, request: Request) -> None:
        if not 1 <= request.num <= self.num:
            raise UsageError(f"num must be 1 to {self.num}, got {request.num}. `bsi sample` draws more.")
        if not 2 <= request.evaluations <= self.evaluations:
            raise UsageError(f"evaluations must be 2 to {self.evaluations}, got {request.evaluations}.")


class _Sampling(BaseModel):
    """Settings that all requests share."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    seed: int = Field(ge=0, lt=2**53)  # the integers that JavaScript represents exactly
    num: int
    evaluations: int
    solver: str = Field(max_length=32)
    grid: str = Field(max_length=32)
    label: int | None = None
    guidance: float = Field(default=1.0, ge=0, le=MAX_GUIDANCE)


class Draw(_Sampling):
    """Samples from the prior."""

    kind: Literal["draw"]


class Denoise(_Sampling):
    """Samples from p(x | y), where y is a measurement of `image` with this precision."""

    kind: Literal["denoise"]
    image: str
    precision: float = Field(gt=0)


class Inpaint(_Sampling):
    """Samples that equal `image` where `hidden` is 0; `hidden` has one byte per pixel, row by row."""

    kind: Literal["inpaint"]
    image: str
    hidden: str


Request = Annotated[Draw | Denoise | Inpaint, Field(discriminator="kind")]


def encode(image: Float32[np.ndarray, "..."]) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(image.astype("<f4").tobytes()).decode("ascii")


def decode_image(text: str, shape: tuple[int, ...]) -> Float32[np.ndarray, "*shape"]:
    """The inverse of `encode` for one finite image of known shape."""
    x = np.frombuffer(_decode(text, 4 * math.prod(shape), "image"), "<f4").reshape(shape)
    if not np.isfinite(x).all():
        raise UsageError("image must be finite, got NaN or infinity.")
    return x


def decode_mask(text: str, height: int, width: int) -> UInt8[np.ndarray, "height width"]:
    """One byte per pixel from base64."""
    return np.frombuffer(_decode(text, height * width, "hidden"), np.uint8).reshape(height, width)


def _decode(text: str, size: int, name: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"{name} must be base64: {error}") from error
    if len(data) != size:
        raise UsageError(f"{name} must have {size} bytes, got {len(data)}.")
    return data
