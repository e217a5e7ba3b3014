"""Matrix products through cuBLASLt, with epilogues that PyTorch does not offer and the fastest algorithm.

    product            x W^T, with a bias, and with GELU (tanh form), whose argument the same kernel can write
    input_gradient     dy W
    weight_gradient    dy^T x

of matrices in bfloat16 or 8 bits, accumulated in float32. A product of 8-bit matrices sums over the axis along which
both are contiguous, so those of the gradients are transposed first.

The library is the one that PyTorch has loaded. It is called through ctypes, so that nothing needs to be compiled. For
every new shape, the algorithms proposed by the library are timed once and the fastest is used; it can be 10 % faster
than the first proposal. Most proposals are timed by a single run, and only near-best ones by more runs, since the
timing delays the first step. The library's epilogues for the backward pass (DGELU, BGRAD) run as separate, slow
kernels; dit_kernels.py does that work.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from enum import IntEnum

import torch
from torch import Tensor

from bsi.kernels.dit_kernels import Matrix, PerChannel, Rows, Scalar, transpose

WORKSPACE_BYTES = 64 << 20
PROPOSALS = 32
TIMED_RUNS = 5
CONTENDS, JITTER_S = 1.05, 1e-5  # a proposal this close to the best in one run is timed by more runs

_COMPUTE_F32 = 68  # cublasComputeType_t
_KIND = {torch.float32: 0, torch.bfloat16: 14, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}  # cudaDataType_t
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
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


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


Kind = tuple[torch.Size, torch.dtype]  # of a row-major matrix without padding


def _layout(shape: torch.Size, dtype: torch.dtype) -> c_void_p:
    """The library is column-major: it sees the transpose of every matrix."""
    layout, (rows, columns) = c_void_p(), shape
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), _KIND[dtype], columns, rows, columns), "a layout")
    return layout


class _Product:
    """out = op(a) op(b) of one shape: its descriptors and the fastest of the proposed algorithms.

    `fast` lets 8-bit products use reduced-precision accumulators.
    """

    def __init__(
        self, a: Kind, b: Kind, out: Kind, transpose_a: bool, transpose_b: bool, epilogue: Epilogue, fast: bool,
        device: int,
    ) -> None:  # fmt: skip
        library, self.device, self.lock = _library(), device, threading.Lock()
        self.name = f"the product of {a} and {b} in {out} ({epilogue.name})"
        self.description, preference = c_void_p(), c_void_p()
        status = library.cublasLtMatmulDescCreate(byref(self.description), _COMPUTE_F32, _KIND[torch.float32])
        _check(status, "a description")
        # Transposed, out^T = op(b)^T op(a)^T, so b comes first.
        self._set(_TRANSA, c_int32(int(transpose_b)))
        self._set(_TRANSB, c_int32(int(transpose_a)))
        self._set(_EPILOGUE, c_int32(int(epilogue)))
        if epilogue == Epilogue.GELU_AUX_BIAS:
            self._set(_AUX_LD, c_int64(out[0][1]))
        if a[1].itemsize == 1:
            self._set(_FAST_ACCUMULATION, c_int8(int(fast)))
            if epilogue != Epilogue.NONE:
                self._set(_BIAS_TYPE, c_int32(_KIND[torch.bfloat16]))
            if epilogue == Epilogue.GELU_AUX_BIAS:
                self._set(_AUX_TYPE, c_int32(_KIND[torch.bfloat16]))
        self.left, self.right, self.out = _layout(*b), _layout(*a), _layout(*out)
        # The matrix C, which is not added (beta is 0) but must have a valid type; 8-bit types are not valid.
        self.added = _layout(out[0], torch.bfloat16) if out[1].itemsize == 1 else self.out
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "a preference")
        limit = c_size_t(WORKSPACE_BYTES)
        library.cublasLtMatmulPreferenceSetAttribute(preference, c_int(_MAX_WORKSPACE), byref(limit), c_size_t(8))
        self.proposals, found = (_Proposal * PROPOSALS)(), c_int()
        status = library.cublasLtMatmulAlgoGetHeuristic(
            _handle(device), self.description, self.left, self.right, self.added, self.out, preference,
            c_int(PROPOSALS), self.proposals, byref(found),
        )  # fmt: skip
        library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status or int(found.value == 0), self.name)
        self.found, self.chosen = found.value, -1

    def _set(self, attribute: int, value: ctypes._SimpleCData) -> None:
        status = _library().cublasLtMatmulDescSetAttribute(
            self.description, c_int(attribute), byref(value), c_size_t(ctypes.sizeof(value))
        )
        _check(status, f"attribute {attribute}")

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, others: dict[int, Tensor | None]) -> None:
        """`others` are tensors that the description points to."""
        with self.lock:
            for attribute, tensor in others.items():
                if tensor is not None:
                    self._set(attribute, c_void_p(tensor.data_ptr()))
            if self.chosen < 0:
                self.chosen = self._fastest(a, b, out)
            _check(self._run(self.chosen, a, b, out), self.name)

    def _run(self, proposal: int, a: Tensor, b: Tensor, out: Tensor) -> int:
        one, zero = c_float(1.0), c_float(0.0)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        return int(
            _library().cublasLtMatmul(
                _handle(self.device), self.description, byref(one), c_void_p(b.data_ptr()), self.left,
                c_void_p(a.data_ptr()), self.right, byref(zero),
                c_void_p(out.data_ptr() if self.added is self.out else None), self.added,
                c_void_p(out.data_ptr()), self.out, byref(self.proposals[proposal]),
                c_void_p(_workspace(self.device, stream).data_ptr()), c_size_t(WORKSPACE_BYTES), c_void_p(stream),
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


_plan = functools.cache(_Product)


def multiply(
    a: Matrix, b: Matrix, transpose_a: bool = False, transpose_b: bool = False, epilogue: Epilogue = Epilogue.NONE,
    bias: PerChannel | None = None, aux: Rows | None = None, out_dtype: torch.dtype = torch.bfloat16,
    out_scale: Scalar | None = None, fast: bool = True,
) -> Rows:  # fmt: skip
    """op(a) op(b); the epilogue reads `bias` and writes `aux`. An output in 8 bits is multiplied by `out_scale`."""
    x, y = a.rows.contiguous(), b.rows.contiguous()
    size = x.shape[1 if transpose_a else 0], y.shape[0 if transpose_b else 1]
    out = torch.empty(size, dtype=out_dtype, device=x.device)
    kinds = [(matrix.shape, matrix.dtype) for matrix in (x, y, out)]
    plan = _plan(*kinds, transpose_a, transpose_b, epilogue, fast, x.get_device())
    # b is the library's first factor, A.
    scales = {_SCALE_A: b.inverse, _SCALE_B: a.inverse, _SCALE_D: out_scale}
    plan(x, y, out, {_BIAS_POINTER: bias, _AUX_POINTER: aux, **scales})
    return out


def product(
    x: Matrix, weight: Matrix, epilogue: Epilogue = Epilogue.NONE, bias: PerChannel | None = None,
    aux: Rows | None = None, out_dtype: torch.dtype = torch.bfloat16, out_scale: Scalar | None = None,
) -> Rows:  # fmt: skip
    return multiply(x, weight, False, True, epilogue, bias, aux, out_dtype, out_scale)


def input_gradient(dy: Matrix, weight: Matrix) -> Rows:
    return multiply(dy, weight) if weight.inverse is None else multiply(dy, transpose(weight), transpose_b=True)


def weight_gradient(dy: Matrix, x: Matrix, dtype: torch.dtype) -> Rows:
    """In the type of the weight: the gradient of a float32 weight is not rounded."""
    if x.inverse is None:
        return multiply(dy, x, transpose_a=True, out_dtype=dtype)
    return multiply(transpose(dy), transpose(x), transpose_b=True, out_dtype=dtype, fast=False)
