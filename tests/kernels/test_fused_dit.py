"""The fused blocks of a DiT equal its plain blocks, dropout included, in Triton's interpreter.

cuBLASLt needs a GPU: its products are replaced by PyTorch's, in float32. The script
docs/benchmarks/agreement.py compares the real kernels with float32 on a GPU.
"""

import pytest

from triton_interpreter import about, needs_triton, printed

SETTING = """
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from torch.nn.functional import gelu

from bsi.backbones import DiTConfig, build, freeze
from bsi.backbones.layers import draw_seeds, dropout
from bsi.kernels import cublaslt
from bsi.kernels.cublaslt import Epilogue
from bsi.kernels.dit_kernels import gated_layer_norm, quantize, transpose
from bsi.kernels.fused_dit import FusedDiT

def multiply(a, b, transpose_a=False, transpose_b=False, epilogue=Epilogue.NONE, bias=None, aux=None, out_dtype=None,
             out_scale=None, fast=True):
    a, b = (m.rows if m.inverse is None else m.rows.float() * m.inverse for m in (a, b))
    out = (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)
    out = out if bias is None else out + bias
    if aux is not None:
        aux.copy_(out)
    if epilogue in (Epilogue.GELU_BIAS, Epilogue.GELU_AUX_BIAS):
        out = gelu(out, approximate="tanh")
    return out if out_scale is None else (out * out_scale).clamp(-448, 448).to(out_dtype)

cublaslt.multiply = multiply
own = interpreter._convert_float

def convert(data, source, target, rounding):  # the interpreter's own loses the carry when it rounds up
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    if source == tl.float32 and target in kinds:
        return torch.tensor(data.view("float32")).to(kinds[target]).view(torch.uint8).numpy()
    return own(data, source, target, rounding)

interpreter._convert_float = convert

def network(p, depth=2):
    torch.manual_seed(0)
    network = build(DiTConfig(width=48, depth=depth, heads=4, dropout=p), (3, 8, 8), 256)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return network

def errors(fast, p):
    dit, results = network(p), []
    x, t = torch.randn(2, 3, 8, 8, requires_grad=True), torch.rand(2, requires_grad=True)
    direction, inputs = torch.randn(2, 3, 8, 8), [x, t, *dit.parameters()]
    for form in (None, fast):
        dit.fast = form
        torch.manual_seed(1)  # what dropout draws
        out = dit(x, t)
        results.append([out, *torch.autograd.grad((out * direction).sum(), inputs)])
    return [float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(*results)]
"""

FUSED = """
for lean, p in ((False, 0.0), (False, 0.25), (True, 0.25)):
    print("error", max(errors(FusedDiT(lean), p)))

dit, inputs = network(0.2).eval(), (torch.randn(2, 3, 8, 8), torch.rand(2))
expected = dit(*inputs)
dit.fast = FusedDiT()
with torch.no_grad():
    print("error", float((dit(*inputs) - expected).abs().max()) / 10)

seed, branch = draw_seeds(1, torch.device("cpu"))[0], torch.randn(2, 7, 24)
zero, one = torch.zeros(2, 24), torch.ones(2, 24)
normed = gated_layer_norm(torch.zeros(2, 7, 24), branch, zero[0], one, zero, zero, 0.4, seed)
print("error", float((normed.stream - dropout(branch, 0.4, seed)).abs().max()))

total = dit(*inputs).sum()
total.backward(retain_graph=True)
try:
    total.backward()
except RuntimeError as error:
    print("rejected", error)
"""

EIGHT = """
x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
    q = quantize(x, x.abs().amax(), kind)
    print("exact", float((q.rows.float() - (x / q.inverse).to(kind).float()).abs().max()))
    print("exact", float((transpose(q).rows.float() - q.rows.float().t()).abs().max()))
    print("exact", float(q.rows.float().abs().max() < 0.9 * torch.finfo(kind).max / 2))  # rounded down, may be half
print("exact", float(quantize(torch.zeros(4, 16), torch.zeros(())).inverse != 1))
for p in (0.0, 0.25):
    print("error", *errors(FusedDiT(fp8=True), p))

dit, inputs = network(0.0), (torch.randn(2, 3, 8, 8), torch.rand(2))
dit.compute_dtype, dit.fast = torch.float32, FusedDiT(fp8=True)
with torch.no_grad():
    before = dit(*inputs)
    freeze(dit)
    assert len(dit.fast.frozen) == 4
    print("exact", float((dit(*inputs) - before).abs().max()))
"""


@needs_triton
@pytest.mark.slow
def test_fused_blocks_agree_with_the_plain_ones() -> None:
    lines = printed(SETTING + FUSED)
    distances = [float(number) for (number,) in about(lines, "error")]
    assert len(distances) == 5
    assert max(distances) < 1e-5, distances
    assert "one backward pass" in lines[-1]


@pytest.mark.slow
@needs_triton
def test_fp8_blocks_agree_with_the_plain_ones_up_to_rounding() -> None:
    lines = printed(SETTING + EIGHT)
    exact = [float(number) for (number,) in about(lines, "exact")]
    assert len(exact) == 8
    assert max(exact) == 0, "scaling, rounding, transposing, and frozen weights"
    for numbers in about(lines, "error"):
        output, *gradients = map(float, numbers)
        assert output < 0.06, "four significant bits, in four products"
        assert max(gradients) < 0.2, "three significant bits, in each gradient"


@needs_triton
@pytest.mark.parametrize("times", [[3.0, 1.0, 2.0, 1.02, 9.0, 0.99], [float("inf"), 2.0, 1.0], [1.0], [2e-5, 1e-5]])
def test_autotuning_finds_the_fastest_product_and_runs_slow_ones_once(times: list[float]) -> None:
    from bsi.kernels.cublaslt import TIMED_RUNS, quickest

    runs = dict.fromkeys(range(len(times)), 0)

    def seconds(i: int, count: int) -> float:
        runs[i] += count
        return times[i] * (1.04 if count == 1 else 1.0)  # a single run is less exact

    assert quickest(len(times), seconds) == times.index(min(times))
    clearly = [i for i, time in enumerate(times) if time > 1.5 * min(times[: i + 1]) + 1e-4]
    assert all(runs[i] == 1 for i in clearly)
    assert max(runs.values()) == 1 + TIMED_RUNS
