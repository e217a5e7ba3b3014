"""The noise kernel draws the numbers of rng.py: in Triton's interpreter, and on a GPU if there is one."""

import importlib
from pathlib import Path

import pytest
import torch

import bsi
from bsi.brownian import BrownianPath
from bsi.rng import seed_words, standard_normal, weighted_normals
from triton_interpreter import needs_triton, printed

SAME = """
import torch

from bsi import rng as noise
from bsi.kernels import philox as noise_kernels

def differ(seed, samples, places, weights, n):
    inputs = noise.seed_words(seed, samples.device), samples, torch.tensor(places), torch.tensor(weights)
    found, wanted = noise_kernels.weighted_normals(*inputs, n), noise.weighted_normals(*inputs, n)
    assert found.shape == wanted.shape and found.dtype == torch.float32
    return float((found - wanted).abs().max()) / max(abs(w) for w in weights)

few, many = torch.tensor([0, 5, 2**32 - 1, 2**40 + 3]), torch.arange(70)[::2]
print("normals", differ(0, few, [0], [1.0], 4))
print("normals", differ(2**64 - 1, few, [3, 2**31 + 5], [1.0, -2.0], 3 * 32 * 32))
print("normals", differ(2**40 + 7, many, [9, 8, 7], [1e-4, 65536.0, 3.0], 1027))  # elements left over
assert noise_kernels.weighted_normals(noise.seed_words(1, few.device), few[:0], few, few.float(), 4).shape == (0, 4)
"""


@needs_triton
@pytest.mark.slow
def test_the_noise_kernel_agrees_with_the_plain_function() -> None:
    lines = printed(SAME)
    assert len(lines) == 3
    assert max(float(line.split()[1]) for line in lines) < 2e-6, lines


@needs_triton
def test_the_import_hook_for_shapes_skips_kernels() -> None:
    """The hook replaces functions by wrappers with another namespace, in which a kernel would not find its names."""
    package, found = Path(bsi.__file__).parent, 0
    for path in (package / "kernels").glob("[a-z]*.py"):
        module = importlib.import_module(".".join(("bsi", *path.relative_to(package).with_suffix("").parts)))
        for name, kernel in vars(module).items():
            if callable(getattr(kernel, "fn", None)) and kernel.fn.__module__ == module.__name__:
                found += 1
                assert kernel.fn.__globals__ is vars(module), f"{module.__name__}.{name}: no_type_check is missing"
    assert found > 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_on_a_gpu_equals_noise_on_a_cpu() -> None:
    samples = torch.tensor([3, 2**33, 17])
    places, weights = torch.tensor([4, 1, 9]), torch.tensor([2.0, 0.5, -1.0])
    here = weighted_normals(seed_words(5, samples.device), samples, places, weights, 1000)
    there = [each.cuda() for each in (seed_words(5, samples.device), samples, places, weights)]
    torch.testing.assert_close(weighted_normals(*there, 1000).cpu(), here, rtol=0, atol=1e-5)
    whole = standard_normal(7, samples.cuda(), 2, (3, 32, 32))
    assert torch.equal(standard_normal(7, samples[1:2].cuda(), 2, (3, 32, 32)), whole[1:2])
    path, apart = BrownianPath(1, samples.cuda(), (5,)), BrownianPath(1, samples[2:].cuda(), (5,))
    assert torch.equal(path(0.0, 3.0)[2:], apart(0.0, 3.0))
