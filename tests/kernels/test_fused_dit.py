"""A DiT's fused blocks compute what its plain blocks compute, dropout included, in Triton's interpreter.

cuBLASLt needs a GPU: its products are replaced by PyTorch's, in float32. `bsi bench train --check` compares the real
kernels with float32 on a GPU.
"""

import pytest

from triton_interpreter import needs_triton, printed

SETTING = """
import torch
from torch.nn.functional import gelu, linear

from bsi.backbones import DiTConfig, build
from bsi.kernels import cublaslt
from bsi.backbones.layers import modulated_norm
from bsi.backbones.layers import draw_seeds, dropout

def linear_gelu(h, weight, bias, aux):
    before = linear(h, weight, bias)
    if aux is not None:
        aux.copy_(before)
    return gelu(before, approximate="tanh")

cublaslt.product = lambda a, b, transpose_a=False, transpose_b=False: (
    (a.t() if transpose_a else a) @ (b.t() if transpose_b else b))
cublaslt.linear, cublaslt.linear_gelu = linear, linear_gelu
cublaslt.weight_grad = lambda dy, x, weight: dy.t() @ x

def errors(trunk, p):
    torch.manual_seed(0)
    network = build(DiTConfig(width=48, depth=2, heads=4, dropout=p), (3, 8, 8), 256)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, condition = torch.randn(2, 16, 48, requires_grad=True), torch.randn(2, 48, requires_grad=True)
    seeds = draw_seeds(4, x.device).view(-1, 2, 2) if p else None
    direction = torch.randn(2, 16, 48)
    inputs = [x, condition, *network.blocks.parameters(), *network.modulation.parameters()]
    results = []
    for form in ("plain", trunk):
        *modulations, last = network.modulation(condition)
        if form == "plain":
            h = modulated_norm(network.run_blocks(x, modulations, seeds), *last.unbind(1))
        else:
            h = form(x, list(network.blocks), modulations, last, 4, p, seeds)
        results.append([h, *torch.autograd.grad((h * direction).sum(), inputs)])
    return [float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(*results)]
"""

FUSED = """
from bsi.kernels.fused_dit import FusedDiT, bf16, fused_trunk
from bsi.kernels.layer_norm import gated_layer_norm

for lean, p in ((False, 0.0), (False, 0.25), (True, 0.25)):
    print(max(errors(lambda *inputs: fused_trunk(*inputs, [bf16(lean)] * 2), p)))

network = build(DiTConfig(width=48, depth=1, heads=4), (3, 8, 8), 256).eval()
for parameter in network.parameters():
    torch.nn.init.normal_(parameter, std=0.1)
inputs = torch.randn(2, 3, 8, 8), torch.rand(2)
expected = network(*inputs)
network.fast = FusedDiT()
print(float((network(*inputs) - expected).abs().max()) / 10)

seed, branch = draw_seeds(1, torch.device("cpu"))[0], torch.randn(2, 7, 24)
zero, one = torch.zeros(2, 24), torch.ones(2, 24)
normed = gated_layer_norm(torch.zeros(2, 7, 24), branch, zero[0], one, zero, zero, 0.4, seed)
print(float((normed.stream - dropout(branch, 0.4, seed)).abs().max()))

network = build(DiTConfig(width=48, depth=1, heads=4), (3, 8, 8), 256)
*modulations, last = network.modulation(torch.randn(2, 48))
h = fused_trunk(torch.randn(2, 16, 48), list(network.blocks), modulations, last, 4, 0.0, None, [bf16()])
h.sum().backward(retain_graph=True)
try:
    h.sum().backward()
except RuntimeError as error:
    print(error)
"""

EIGHT = """
import triton.language as tl
import triton.runtime.interpreter as interpreter

own = interpreter._convert_float

def convert(data, source, target, rounding):  # the interpreter's own loses the carry when it rounds up
    kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    if source == tl.float32 and target in kinds:
        return torch.tensor(data.view("float32")).to(kinds[target]).view(torch.uint8).numpy()
    return own(data, source, target, rounding)

interpreter._convert_float = convert

from bsi.kernels.branch_gradients import quantize, transpose
from bsi.kernels.fp8 import fp8_forms, quantize_weights
from bsi.kernels.fused_dit import fused_trunk

def product8(a, b, epilogue=1, bias=None, aux=None, out_dtype=None, out_scale=None, fast=True):
    out = (a.rows.float() * a.inverse) @ (b.rows.float() * b.inverse).t()
    out = out if bias is None else out + bias
    if aux is not None:
        aux.copy_(out)
    if out_dtype == torch.float8_e4m3fn:
        return (gelu(out, approximate="tanh") * out_scale).clamp(-448, 448).to(out_dtype)
    return out

cublaslt.product8 = product8
x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0))
for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
    q = quantize(x, x.abs().amax(), kind)
    print(float((q.rows.float() - (x / q.inverse).to(kind).float()).abs().max()))
    print(float((transpose(q.rows).float() - q.rows.float().t()).abs().max()))
    print(float(q.rows.float().abs().max() < 0.9 * torch.finfo(kind).max / 2))  # rounded down, it may be half
print(float(quantize(torch.zeros(4, 16), torch.zeros(())).inverse != 1))
for p in (0.0, 0.25):
    print("out", *errors(lambda *inputs: fused_trunk(*inputs, fp8_forms(inputs[1])), p))

blocks = list(build(DiTConfig(width=48, depth=2, heads=4), (3, 8, 8), 256).blocks)
inputs = torch.randn(2, 16, 48), blocks, [torch.randn(2, 6, 48)] * 2, torch.randn(2, 2, 48), 4, 0.0, None
with torch.no_grad():
    again = fused_trunk(*inputs, fp8_forms(blocks, quantize_weights(blocks, for_training=False)))
print(float((again - fused_trunk(*inputs, fp8_forms(blocks))).abs().max()))
"""


@needs_triton
@pytest.mark.slow
def test_the_fused_blocks_are_the_plain_ones_with_and_without_dropout_lean_or_not() -> None:
    *numbers, refusal = printed(SETTING + FUSED)
    distances = [float(number) for number in numbers]
    assert len(distances) == 5
    assert "one backward pass" in refusal
    assert max(distances) < 1e-5, distances


@pytest.mark.slow
@needs_triton
def test_the_8_bit_blocks_are_the_plain_ones_up_to_the_rounding_of_their_formats() -> None:
    lines = printed(SETTING + EIGHT)
    exact, errors = [float(line) for line in lines if not line.startswith("out")], lines[7:9]
    assert len(exact) == 8
    assert max(exact) == 0, "scaling, rounding, transposing, and frozen weights"
    for line in errors:
        output, *gradients = map(float, line.split()[1:])
        assert output < 0.06, "four binary digits, in four products"
        assert max(gradients) < 0.2, "three binary digits, in each gradient on the way"


@needs_triton
@pytest.mark.parametrize("times", [[3.0, 1.0, 2.0, 1.02, 9.0, 0.99], [float("inf"), 2.0, 1.0], [1.0], [2e-5, 1e-5]])
def test_the_fastest_product_is_found_and_slow_ones_run_once(times: list[float]) -> None:
    from bsi.kernels.cublaslt import TIMED_RUNS, quickest

    runs = dict.fromkeys(range(len(times)), 0)

    def seconds(i: int, count: int) -> float:
        runs[i] += count
        return times[i] * (1.04 if count == 1 else 1.0)  # a single run is less exact

    assert quickest(len(times), seconds) == times.index(min(times))
    clearly = [i for i, time in enumerate(times) if time > 1.5 * min(times[: i + 1]) + 1e-4]
    assert all(runs[i] == 1 for i in clearly)
    assert max(runs.values()) == 1 + TIMED_RUNS
