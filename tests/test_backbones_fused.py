"""The fused trunk computes what the plain blocks compute, dropout included; here in Triton's interpreter.

cuBLASLt needs a GPU: its products are replaced by torch's, in float32. `bsi bench train --check` compares the real
thing with float32 on a GPU. The interpreter is chosen when Triton is imported, and reads the kernels' own source,
which the hook that checks shapes has changed: so this runs in a process of its own.
"""

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from torch.nn.functional import gelu, linear

from bsi.backbones import DiTConfig, build, cublaslt
from bsi.backbones.adaln import modulated_norm
from bsi.backbones.dropout import draw_seeds, dropout
from bsi.backbones.fused import fused_trunk
from bsi.backbones.kernels import gate_norm

def linear_gelu(h, weight, bias, aux):
    before = linear(h, weight, bias)
    if aux is not None:
        aux.copy_(before)
    return gelu(before, approximate="tanh")

cublaslt.product = lambda a, b, transpose_a=False, transpose_b=False: (
    (a.t() if transpose_a else a) @ (b.t() if transpose_b else b))
cublaslt.linear, cublaslt.linear_gelu = linear, linear_gelu
cublaslt.weight_grad = lambda dy, x, weight: dy.t() @ x

def compare(lean, p):
    torch.manual_seed(0)
    network = build(DiTConfig(width=48, depth=2, heads=4, dropout=p), (3, 8, 8), 256)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, condition = torch.randn(2, 16, 48, requires_grad=True), torch.randn(2, 48, requires_grad=True)
    seeds = draw_seeds(4, x.device).view(-1, 2, 2) if p else None
    direction = torch.randn(2, 16, 48)
    inputs = [x, condition, *network.blocks.parameters(), *network.modulation.parameters()]
    results = []
    for fused in (False, True):
        *modulations, last = network.modulation(condition)
        if fused:
            h = fused_trunk(x, list(network.blocks), modulations, last, 4, p, seeds, lean)
        else:
            h = modulated_norm(network._blocks(x, modulations, seeds), *last.unbind(1))
        results.append([h, *torch.autograd.grad((h * direction).sum(), inputs)])
    return max(float((mine - theirs).norm() / theirs.norm()) for theirs, mine in zip(*results))

for lean in (False, True):
    for p in (0.0, 0.25):
        print(compare(lean, p))

seed, branch = draw_seeds(1, torch.device("cpu"))[0], torch.randn(2, 7, 24)
zero, one = torch.zeros(2, 24), torch.ones(2, 24)
normed = gate_norm(torch.zeros(2, 7, 24), branch, zero[0], one, zero, zero, 0.4, seed)
print(float((normed.stream - dropout(branch, 0.4, seed)).abs().max()))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton, with its interpreter, is not installed")
def test_the_fused_trunk_is_the_plain_one_with_and_without_dropout_lean_or_not() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", CHECK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    distances = [float(line) for line in done.stdout.split()]
    assert len(distances) == 5
    assert max(distances) < 1e-5, distances
