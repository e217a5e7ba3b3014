"""Matrix products through cuBLASLt, with epilogues that PyTorch does not offer and the fastest algorithm.

    linear_gelu      gelu(h W^T + b), and GELU's argument, both written by the kernel of the product
    product8         a b^T of 8-bit matrices, each with a factor on the device; with GELU as above

The library is the one that PyTorch has loaded. It is called through ctypes, so that nothing needs to be compiled. For
every new shape, the algorithms proposed by the library are timed once and the fastest is used; it can be 10 % faster
than the first proposal. Most proposals are timed by a single run, and only near-best ones by more runs, since the
timing delays the first step.
The library's epilogues for the backward pass (DGELU, BGRAD) run as separate, slow kernels; branch_gradients.py does
that work. GELU is the tanh form. CUDA, bfloat16 and 8 bits only.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from bsi.kernels.branch_gradients import Matrix8

WORKSPACE_BYTES = 64 << 20
PROPOSALS = 32
TIMED_RUNS = 5
CONTENDS, JITTER_S = 1.05, 1e-5  # a proposal this close to the best in one run is timed by more runs

_COMPUTE_F32 = 68  # cublasComputeType_t
_KIND = {  # cudaDataType_t
    torch.float32: 0,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
    torch.float8_e5m2: 29,
}
# cublasLtMatmulDescAttributes_t
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD = 3, 4, 7, 8, 11, 12
_SCALE_A, _SCALE_B, _SCALE_D, _AUX_TYPE, _FAST_ACCUMULATION, _BIAS_TYPE = 17, 18, 20, 22, 25, 26
_MAX_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t


class Epilogue(IntEnum):
    """cublasLtEpilogue_t"""

    NONE = 1
    BIAS = 4
    GELU_BIAS = 36
    GELU_AUX_BIAS = 164


class _Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")
    library.cublasLtMatrixLayoutCreate.argtypes = [c_void_p, c_int, c_uint64, c_uint64, c_int64]
    return library


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed to make {what}, got status {status}")


@functools.cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)), "a handle")
    return handle


@functools.cache
def _workspace(device: int, stream: int) -> Tensor:
    """One for each stream, since products on two streams may run at the same time."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


@dataclass(frozen=True)
class _Shape:
    """out (m, n) = op(a) op(b), row-major; `fast` lets 8-bit products use reduced-precision accumulators."""

    m: int
    n: int
    k: int
    transpose_a: bool
    transpose_b: bool
    epilogue: Epilogue
    a_type: torch.dtype
    b_type: torch.dtype
    out_type: torch.dtype
    device: int
    fast: bool = False


@dataclass(frozen=True)
class _Extra:
    """Tensors of a product other than its factors and its output."""

    bias: Tensor | None = None
    aux: Tensor | None = None
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None
    out_scale: Tensor | None = None


class _Product:
    """A product of one shape: its descriptors and the fastest of the proposed algorithms."""

    def __init__(self, shape: _Shape) -> None:
        library, self.shape, self.lock = _library(), shape, threading.Lock()
        self.description, preference = c_void_p(), c_void_p()
        _check(
            library.cublasLtMatmulDescCreate(byref(self.description), _COMPUTE_F32, _KIND[torch.float32]),
            "a description",
        )
        # Row-major data is the transpose of column-major: out^T = op(b)^T op(a)^T, so b comes first.
        self._set(_TRANSA, c_int32(int(shape.transpose_b)))
        self._set(_TRANSB, c_int32(int(shape.transpose_a)))
        self._set(_EPILOGUE, c_int32(int(shape.epilogue)))
        if shape.epilogue == Epilogue.GELU_AUX_BIAS:
            self._set(_AUX_LD, c_int64(shape.n))
        eight = shape.a_type.itemsize == 1
        if eight:
            self._set(_FAST_ACCUMULATION, c_int8(int(shape.fast)))
        if eight and shape.epilogue != Epilogue.NONE:
            self._set(_BIAS_TYPE, c_int32(_KIND[torch.bfloat16]))
        if eight and shape.epilogue == Epilogue.GELU_AUX_BIAS:
            self._set(_AUX_TYPE, c_int32(_KIND[torch.bfloat16]))
        left, right = (shape.k, shape.n), (shape.m, shape.k)
        self.left = _layout(*(left if shape.transpose_b else left[::-1]), shape.b_type)
        self.right = _layout(*(right if shape.transpose_a else right[::-1]), shape.a_type)
        self.out = _layout(shape.n, shape.m, shape.out_type)
        # The matrix C, which is not added (beta is 0) but must have a valid type; 8-bit types are not valid.
        self.added = _layout(shape.n, shape.m, torch.bfloat16) if shape.out_type.itemsize == 1 else self.out
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "a preference")
        limit = c_size_t(WORKSPACE_BYTES)
        library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(_MAX_WORKSPACE), byref(limit), c_size_t(8))
        self.proposals, found = (_Proposal * PROPOSALS)(), c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            _handle(shape.device), self.description, self.left, self.right, self.added, self.out, preference,
            c_int(PROPOSALS), self.proposals, byref(found),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status or int(found.value == 0), f"the product {shape}")
        self.found, self.chosen = found.value, -1

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        status = _library().cublasLtMatmulDescSetAttribute(
            self.description, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        )
        _check(status, f"attribute {attribute}")

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, extra: _Extra) -> None:
        # b is the library's first factor, A
        named = {_BIAS_POINTER: extra.bias, _AUX_POINTER: extra.aux, _SCALE_A: extra.b_scale, _SCALE_B: extra.a_scale,
                 _SCALE_D: extra.out_scale}  # fmt: skip
        with self.lock:
            for attribute, tensor in named.items():
                if tensor is not None:
                    self._set(attribute, c_void_p(tensor.data_ptr()))
            if self.chosen < 0:
                self.chosen = self._fastest(a, b, out)
            _check(self._run(self.chosen, a, b, out), f"the product {self.shape}")

    def _run(self, proposal: int, a: Tensor, b: Tensor, out: Tensor) -> int:
        device = self.shape.device
        one, zero = c_float(1.0), c_float(0.0)
        stream = torch.cuda.current_stream(device).cuda_stream
        workspace = _workspace(device, stream)
        return int(
            _library().cublasLtMatmul(
                _handle(device), self.description, byref(one), c_void_p(b.data_ptr()), self.left,
                c_void_p(a.data_ptr()), self.right, byref(zero),
                c_void_p(out.data_ptr() if self.added is self.out else None), self.added,
                c_void_p(out.data_ptr()), self.out, byref(self.proposals[proposal]), c_void_p(workspace.data_ptr()),
                c_size_t(WORKSPACE_BYTES), c_void_p(stream),
            )
        )  # fmt: skip

    def _fastest(self, a: Tensor, b: Tensor, out: Tensor) -> int:
        """The fastest proposal on these inputs; the output is overwritten."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def seconds(proposal: int, runs: int) -> float:
            if self._run(proposal, a, b, out):  # untimed: it keeps the device busy while the others are launched
                return float("inf")
            start.record()
            for _ in range(runs):
                self._run(proposal, a, b, out)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / runs

        return quickest(self.found, seconds)


def quickest(count: int, seconds: Callable[[int, int], float]) -> int:
    """The index in range(count) with the least time; `seconds(i, runs)` is the mean time of the i-th over some runs."""
    best, chosen = float("inf"), 0
    for i in range(count):
        if seconds(i, 1) <= CONTENDS * best + JITTER_S:
            time = seconds(i, TIMED_RUNS)
            if time < best:
                best, chosen = time, i
    return chosen


def _layout(rows: int, columns: int, kind: torch.dtype) -> c_void_p:
    """A column-major matrix without padding."""
    layout = c_void_p()
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), _KIND[kind], rows, columns, rows), "a layout")
    return layout


@functools.cache
def _plan(shape: _Shape) -> _Product:
    return _Product(shape)


def product(
    a: Float[Tensor, "rows_a columns_a"],
    b: Float[Tensor, "rows_b columns_b"],
    transpose_a: bool = False,
    transpose_b: bool = False,
    epilogue: Epilogue = Epilogue.NONE,
    bias: Float[Tensor, " features"] | None = None,
    aux: Float[Tensor, "rows columns"] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Float[Tensor, "rows columns"]:
    """op(a) op(b) of bfloat16 matrices, accumulated in float32; the epilogue reads `bias` and writes `aux`."""
    a, b = a.contiguous(), b.contiguous()
    m, k = (a.shape[1], a.shape[0]) if transpose_a else (a.shape[0], a.shape[1])
    n = b.shape[0] if transpose_b else b.shape[1]
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    shape = _Shape(m, n, k, transpose_a, transpose_b, epilogue, a.dtype, b.dtype, out_dtype, a.get_device())
    _plan(shape)(a, b, out, _Extra(bias, aux))
    return out


def product8(
    a: Matrix8,
    b: Matrix8,
    epilogue: Epilogue = Epilogue.NONE,
    bias: Float[Tensor, " features"] | None = None,
    aux: Float[Tensor, "rows columns"] | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Float[Tensor, ""] | None = None,
    fast: bool = True,
) -> Shaped[Tensor, "rows columns"]:
    """a b^T; an output in 8 bits is multiplied by `out_scale`. Bias and aux are bfloat16."""
    (m, k), n = a.rows.shape, len(b.rows)
    out = torch.empty(m, n, dtype=out_dtype, device=a.rows.device)
    kinds = a.rows.dtype, b.rows.dtype, out_dtype
    _plan(_Shape(m, n, k, False, True, epilogue, *kinds, a.rows.get_device(), fast))(
        a.rows, b.rows, out, _Extra(bias, aux, a.inverse, b.inverse, out_scale)
    )
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x W^T + b."""
    return product(x, weight, transpose_b=True, epilogue=Epilogue.BIAS, bias=bias)


def linear_gelu(h: Tensor, weight: Tensor, bias: Tensor, aux: Tensor | None) -> Tensor:
    """gelu(h W^T + b); GELU's argument is written to `aux` if given."""
    epilogue = Epilogue.GELU_BIAS if aux is None else Epilogue.GELU_AUX_BIAS
    return product(h, weight, transpose_b=True, epilogue=epilogue, bias=bias, aux=aux)


def weight_grad(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """dW = dy^T x in the type of the weight: the gradient of a float32 weight is not rounded."""
    return product(dy, x, transpose_a=True, out_dtype=weight.dtype)
