"""The fused U-Net equals the plain one, and its kernels their documentation, in Triton's interpreter.

The interpreter multiplies bfloat16 as if it were integers and has no GPU instructions: where a test computes in
bfloat16, both are replaced.
"""

import pytest

from triton_interpreter import about, needs_triton, printed

KERNELS = """
import torch
from torch.nn.functional import silu

from bsi.backbones.layers import draw_seeds, dropout
from bsi.backbones.unet import GroupNorm, to_image, to_rows
from bsi.kernels.fused_unet import rows_of
from bsi.kernels.unet_kernels import (
    _cut, group_norm_act, group_norm_act_backward, pixel_sums, residual_sum, residual_sum_with_skip)

def distances(wanted, found):
    return [float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(wanted, found, strict=True)]

def norm_errors(batch, count, channels, groups, p=0.0, act=True, far=1.0):
    torch.manual_seed(0)
    norm, seed = GroupNorm(groups, channels, eps=1e-6), draw_seeds(1, torch.device("cpu"))[0]
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = (far + torch.randn(batch, count, channels)).requires_grad_()
    shift = torch.randn(batch, 3 * channels)[:, channels:-channels].requires_grad_()
    dy, add = rows_of(torch.randn(batch, 2 * channels, count)).chunk(2, dim=2)  # as a convolution returns them
    more = torch.randn_like(x)
    normed = to_rows(norm(to_image(x, torch.empty(1, 1, count)), shift))
    normed = dropout(silu(normed) if act else normed, p, seed)
    dx, *gradients = torch.autograd.grad((normed * dy).sum(), [x, norm.weight, norm.bias, shift])
    wanted = [normed, dx + add + more, *gradients, add.sum(1)]
    with torch.no_grad():
        nothing, y = torch.full((batch, count, 2 * channels), torch.nan).chunk(2, dim=2)
        around, sums = torch.full((batch, 4, 2 * channels), torch.nan).chunk(2, dim=2)
        moments = group_norm_act(x, norm.weight, norm.bias, groups, y, act, shift, p, seed)
        dx = group_norm_act_backward(dy, x, moments, norm.weight, norm.bias, groups, sums, act, p, seed, add, more)
    assert nothing.isnan().all() and around.isnan().all(), "only slices of the rows are written"
    return distances(wanted, [y, dx, sums[:, 0].sum(0), sums[:, 1].sum(0), sums[:, 2], sums[:, 3]])

for case in (
    (2, 64, 64, 16),  # nothing is left over
    (2, 32, 128, 1, 0.3),  # nor here: one group, wider than a slab and so with fewer pixels at a time
    (2, 64, 192, 32, 0.3),  # groups of six, ten to a slab
    (2, 130, 64, 16, 0.3),  # pixels left over
    (1, 1030, 8, 2, 0.3),  # and of a large image, which is cut otherwise
    (2, 64, 96, 24, 0.3),  # channels left over
    (1, 40, 67, 1, 0.3),  # a group wider than a slab, and no power of two
    (3, 1, 24, 6, 0.3),  # a single pixel, where a stride means nothing
    (2, 9, 70, 14, 0.0, False),
):
    print("norm", max(norm_errors(*case)))
output, gradient, *_ = norm_errors(2, 9, 70, 14, 0.0, False, 1000.0)  # far from 0, where squares would cancel
print("far", output)
print("far", gradient)

assert max(_cut(torch.empty(70_000, 1, 8), 2)[0][1:], default=0) < 2**16, "no more programs than a GPU allows"

for batch, count, channels in ((2, 1, 8), (2, 150, 20), (1, 3, 150)):
    torch.manual_seed(0)
    x, skip, branch = torch.randn(3, batch, count, channels)
    weight, bias = torch.randn(channels, 2 * channels), torch.randn(channels)
    wanted = [x + branch + bias, torch.cat([x, skip], dim=2) @ weight.t() + branch + bias, x.sum(1)]
    print("join", max(distances(
        wanted, [residual_sum(x, branch, bias), residual_sum_with_skip(x, skip, weight, branch, bias), pixel_sums(x)])))
"""

NETWORKS = """
import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from bsi.backbones import UNetConfig, build, freeze
from bsi.backbones.costs import training_memory
from bsi.kernels import fused_unet, unet_kernels
from test_memory_account import kept_per_image

def awake(config, shape, classes=0):
    torch.manual_seed(0)
    network = build(config, shape, 256, classes).train()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return network.to(memory_format=torch.channels_last) if len(shape) == 3 else network

t = torch.tensor([0.2, 0.7])

def results(network, form, x, direction, cond=None, times=1):
    network.fast = None if form == "plain" else fused_unet.FusedUNet(lean=form == "lean")
    torch.manual_seed(1)  # what dropout draws
    out = network(x, t, cond)
    inputs = [x, *(p for p in network.parameters() if p.requires_grad)]
    for _ in range(times):
        gradients = torch.autograd.grad((out * direction).sum(), inputs, retain_graph=True)
    return [out, *gradients]

def farthest(wanted, found):
    return max(float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(wanted, found, strict=True))

for config, shape, form in (
    (UNetConfig(width=16, levels=1, dropout=0.2), (3, 4, 6), "fused"),
    (UNetConfig(width=16, levels=1, dropout=0.2), (3, 4, 6), "lean"),
    (UNetConfig(width=16, levels=1, heads=2, dropout=0.2, coarser=(24,)), (3, 4, 4), "lean"),
    (UNetConfig(width=8, levels=1, coarser=(8,)), (1, 2, 2, 2), "fused"),  # of which a single pixel is left
    (UNetConfig(width=8, levels=1, dropout=0.2), (2, 6), "fused"),
):
    network, cond = awake(config, shape, classes=3), torch.tensor([1, 3])
    x, direction = torch.randn(2, *shape, requires_grad=True), torch.randn(2, *shape)
    wanted, found = (results(network, each, x, direction, cond) for each in ("plain", form))
    print("float32", farthest(wanted, found))

dot = interpreter.InterpreterBuilder.create_dot
cut = unet_kernels._cut

def widened(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
unet_kernels._cut = lambda *inputs: (cut(*inputs)[0], cut(*inputs)[1] | {"FAST": False})

network = awake(UNetConfig(width=8, levels=1, dropout=0.2), (3, 4, 4))
for name, parameter in network.named_parameters():
    parameter.requires_grad_(not name.startswith(("stem", "before.norm_in", "after.conv_in")))
x, direction = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(2, 3, 4, 4)
wanted = results(network, "plain", x, direction)
network.compute_dtype = torch.bfloat16
trained = results(network, "fused", x, direction, times=2)
print("bfloat16", trained[0].dtype, trained[1].dtype, farthest(wanted, trained))
network.eval()
wanted = results(network, "plain", x, direction)[:2]
freeze(network)
print("frozen", farthest(wanted, results(network, "lean", x, direction)))
with torch.no_grad():
    print("frozen", farthest(wanted[:1], [network(x, t)]))

# What is kept does not depend on the numbers: nothing is computed.
unet_kernels.group_norm_act = lambda x, *_: unet_kernels.GroupMoments(*torch.empty(3, len(x), x.shape[2]))
unet_kernels.residual_sum = unet_kernels.residual_sum_with_skip = lambda x, *_: torch.empty_like(x)

for form, coarser in (("fused", ()), ("lean", ()), ("lean", (64,))):
    sizes, accounts = [], []
    for levels in (1, 2):
        config = UNetConfig(width=32, levels=levels, dropout=0.1, coarser=coarser)
        network = build(config, (3, 12, 12), 256).train().to(memory_format=torch.channels_last)
        network.fast = fused_unet.FusedUNet(lean=form == "lean")
        sizes.append(kept_per_image(network))
        accounts.append(training_memory(config, (3, 12, 12), 256, form=form, half=False).per_image)
    print("kept", (sizes[1] - sizes[0]) / (accounts[1] - accounts[0]), sizes[0] / accounts[0])
"""

COMPILED = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bsi.kernels import philox, unet_kernels
from bsi.kernels.dit_kernels import mask_constants

numbers = "pixels channels rows count stride_y stride_shift stride_dy stride_add stride_sums stride_row"
kinds = dict.fromkeys(numbers.split(), "i32") | dict.fromkeys("x y dy dx add more skip branch".split(), "*bf16")
kinds |= {"eps": "fp32", "seed": "*i32"}

def build(kernel, constants, kinds=kinds, **options):
    signature = {n: "constexpr" if n in constants else kinds.get(n, "*fp32") for n in kernel.arg_names}
    done = triton.compile(ASTSource(kernel, signature, constants), GPUTarget("cuda", 90, 32), options)
    print(kernel.__name__, len(done.asm["cubin"]))

for count, channels, groups in ((1024, 128, 32), (1024, 192, 32), (1, 2051, 1)):
    _, cut = unet_kernels._cut(torch.empty(1, count, channels, dtype=torch.bfloat16), groups)
    options = {name: cut.pop(name) for name in ("num_warps", "maxnreg")}
    shared = {"GROUP": channels // groups, "ACT": True} | mask_constants(0.1) | cut
    shared |= {"pixels": 1} if count == 1 else {}
    build(unet_kernels._group_norm_act, shared | {"SHIFT": True}, **options)
    build(unet_kernels._group_norm_act_backward, shared | {"ADD": True, "MORE": True}, **options)
tiles = {"ROWS": 128, "COLUMNS": 128, "DEPTH": 32}
build(unet_kernels._residual_sum, {"BLOCK": 2048}, num_warps=8)
build(unet_kernels._residual_sum_with_skip, tiles, kinds | {"weight": "*bf16"}, num_warps=4)
build(unet_kernels._pixel_sums, {"SLAB": 64, "TILE": 128}, num_warps=8)
integers = dict.fromkeys(("n", "terms"), "i32") | dict.fromkeys(("seed", "samples", "places"), "*i64")
build(philox._weighted_normals, {"QUADS": philox.QUADS}, integers, num_warps=4)
"""


@needs_triton
@pytest.mark.slow
def test_the_kernels_agree_with_torch_for_all_remainders() -> None:
    lines = printed(KERNELS)
    norms, joins = ([float(number) for (number,) in about(lines, what)] for what in ("norm", "join"))
    assert len(norms) == 9
    assert max(norms) < 3e-6, norms
    assert len(joins) == 3
    assert max(joins) < 1e-6, joins
    output, gradient = (float(number) for (number,) in about(lines, "far"))
    assert max(output, gradient) < 2e-3, "1e-7 of 1000 is 1e-4 of a deviation"


@needs_triton
def test_the_kernels_compile_for_an_h200_without_one() -> None:
    """The interpreter does not show whether code fits the registers and the instructions of a GPU."""
    lines = printed(COMPILED, interpret=False)
    assert len(lines) == 10
    assert all(int(line.split()[1]) > 0 for line in lines)


@pytest.mark.slow
@needs_triton
def test_the_fused_unet_agrees_with_the_plain_one_and_its_memory_estimate() -> None:
    lines = printed(NETWORKS)
    distances = [float(number) for (number,) in about(lines, "float32")]
    assert len(distances) == 5
    assert max(distances) < 1e-5, distances
    ((out, dx, distance),) = about(lines, "bfloat16")
    assert out == dx == "torch.float32", "outside"
    assert float(distance) < 0.08, "two digits, through some thirty layers and back"
    (with_gradient,), (without,) = about(lines, "frozen")
    assert float(with_gradient) < 0.03
    assert float(without) < 0.01
    accounts = about(lines, "kept")
    assert len(accounts) == 3
    for more, all_levels in accounts:
        assert float(more) == pytest.approx(1, rel=0.05), "of one more level"
        assert 1 / 2.5 < float(all_levels) < 1, "the working memory of one block comes on top"
