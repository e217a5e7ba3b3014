"""The networks: the published functions, initialization, conditioning and gradients."""

import math

import pytest
import torch
from torch.nn.functional import linear, silu

import bsi
from bsi.backbones import Backbone, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, cost
from bsi.backbones.dit import patchify, unpatchify
from bsi.backbones.unet import GroupNorm, group_norm
from bsi.errors import UsageError

TINY: dict[str, tuple[BackboneConfig, tuple[int, ...]]] = {
    "dit-1d": (DiTConfig(width=16, depth=2, heads=2, patch=4), (2, 8)),
    "dit-window": (DiTConfig(width=16, depth=2, heads=2, patch=2, kernel=3), (2, 8)),
    "dit-2d": (DiTConfig(width=16, depth=2, heads=2, patch=2), (3, 4, 6)),
    "dit-3d": (DiTConfig(width=16, depth=2, heads=4, patch=2), (1, 4, 2, 4)),
    "unet-1d": (UNetConfig(width=8, levels=2), (2, 6)),
    "unet-2d": (UNetConfig(width=8, levels=2), (3, 4, 6)),
    "unet-coarser-1d": (UNetConfig(width=8, levels=2, coarser=(12,)), (2, 6)),
    "unet-coarser-2d": (UNetConfig(width=8, levels=2, heads=2, coarser=(12, 16)), (3, 4, 8)),
    "unet-coarser-3d": (UNetConfig(width=8, levels=1, coarser=(8,)), (1, 4, 2, 2)),
    "mlp": (MLPConfig(width=16, depth=2), (5,)),
    "mlp-2d": (MLPConfig(width=16, depth=2), (2, 3)),
}
every_kind = pytest.mark.parametrize("kind", TINY)


def awake(network: Backbone) -> Backbone:
    """The network with every parameter that starts at 0 moved away, as by training."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if not parameter.any():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return network


def tiny(kind: str, bins_count: int | None = 256, num_classes: int = 0) -> Backbone:
    torch.manual_seed(0)
    return build(*TINY[kind], bins_count, num_classes)


def batch(network: Backbone, size: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, *network.shape, generator=generator), torch.rand(size, generator=generator)


@every_kind
def test_output_is_zero_before_training_and_every_parameter_learns(kind: str) -> None:
    """Gradients move the layers that start at zero. The state dict holds parameters only."""
    network = tiny(kind)
    x, t = batch(network)
    out = network(x, t)
    assert (out.shape, out.dtype, bool(out.any())) == (x.shape, torch.float32, False)
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (network(x, t) - 1).square().mean().backward()
        optimizer.step()
    assert network(x, t).any()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


@every_kind
def test_out_channels_are_logits_for_every_position(kind: str) -> None:
    config, shape = TINY[kind]
    network = build(config, shape, out_channels=7)
    x, t = batch(network)
    assert not network(x, t).any()
    logits = awake(network)(x, t)
    assert logits.shape == (3, 7, *shape[1:])
    assert logits.std(dim=1).min() > 0
    assert cost(config, shape, out_channels=7).parameters == sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("unet-coarser-2d", ("project.weight", "conv_out.weight", "attention.out.weight", "head.conv.weight")),
        ("dit-2d", ("modulation.project.weight", "head.project.weight")),
    ],
)
def test_the_published_layers_start_at_zero(kind: str, zero: tuple[str, ...]) -> None:
    weights = {name: weight for name, weight in tiny(kind).named_parameters() if weight.ndim > 1}
    assert {name for name, weight in weights.items() if not weight.any()} == {n for n in weights if n.endswith(zero)}


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("unet-2d", ["condition", "project", "stem", "down", "before", "attention", "after", "up", "head"]),
        ("dit-2d", ["embed", "condition", "modulation", "blocks", "head"]),
        ("mlp", ["embed", "condition", "modulation", "blocks", "head"]),
    ],
)
def test_a_seed_initializes_the_parts_in_a_fixed_order(kind: str, parts: list[str]) -> None:
    assert list(dict.fromkeys(name.partition(".")[0] for name in tiny(kind).state_dict())) == parts


@every_kind
def test_samples_of_a_batch_are_independent_and_labels_matter(kind: str) -> None:
    network = awake(tiny(kind, num_classes=4)).eval()
    x, t = batch(network)
    labels = torch.tensor([0, 3, 1])
    labeled, unlabeled = network(x, t, labels), network(x, t)
    torch.testing.assert_close(labeled[1:2], network(x[1:2], t[1:2], labels[1:2]), atol=1e-5, rtol=1e-4)
    assert not torch.isclose(labeled, unlabeled).all(dim=-1).any()
    assert unlabeled.equal(network(x, t, torch.full((3,), 4))), "the last label stands for none"


@every_kind
def test_gradients_agree_with_finite_differences_in_float64(kind: str) -> None:
    """Along random directions of input, precision and all parameters; the fastest sine of t limits the step."""
    network = awake(tiny(kind, bins_count=2)).double().eval()
    x, t = (v.double() for v in batch(network, 2))
    leaves = [x.requires_grad_(), t.requires_grad_(), *network.parameters()]
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def value() -> torch.Tensor:
        return (network(x, t) * weights).sum()

    gradients, step = torch.autograd.grad(value(), leaves), 1e-7
    for _ in range(2):
        directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
        slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        ends = []
        with torch.no_grad():
            for sign in (1, -1):
                for leaf, d in zip(leaves, directions, strict=True):
                    leaf += sign * step * d
                ends.append(value())
                for leaf, d in zip(leaves, directions, strict=True):
                    leaf -= sign * step * d
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-5, atol=1e-6)


def test_patchify_keeps_pixels_of_a_patch_together_and_unpatchify_inverts_it() -> None:
    x = torch.arange(2 * 3 * 4 * 6 * 2.0).view(2, 3, 4, 6, 2)
    tokens = patchify(x, 2)
    assert tokens.shape == (2, 6, 24)
    assert tokens[1, 4].equal(x[1, :, 2:4, 2:4, 0:2].flatten())
    assert unpatchify(tokens, (2, 3, 1), 2).equal(x)


@pytest.mark.parametrize("shape", [(3, 12), (3, 12, 8)])
def test_a_token_is_computed_from_a_window_of_patches(shape: tuple[int, ...]) -> None:
    config = DiTConfig(width=8, depth=1, heads=2, patch=2, kernel=3)
    network = build(config, shape)
    assert cost(config, shape).parameters == sum(p.numel() for p in network.parameters())
    x = torch.randn(1, *shape, requires_grad=True)
    tokens = network.embed(x)
    assert tokens.shape == (1, math.prod(config.grid(shape)), 8)
    (gradient,) = torch.autograd.grad(tokens[0, 0].sum(), x)
    window = torch.zeros(shape, dtype=torch.bool)
    window[(slice(None), *[slice(4)] * (len(shape) - 1))] = True
    assert torch.equal(gradient[0] != 0, window)
    with pytest.raises(UsageError, match="odd"):
        DiTConfig(width=8, depth=1, heads=2, kernel=2)


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_dit_equals_its_published_definition() -> None:
    network = awake(tiny("dit-2d")).double().eval()
    x, t = (v.double() for v in batch(network))
    width, heads = 16, 2
    condition = network.condition(t)
    tokens = network.embed(patchify(network.fourier(x), 2)) + network.positions
    projections = network.modulation.project(condition).view(3, -1, 1, width).unbind(1)
    for i, block in enumerate(network.blocks):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = projections[6 * i : 6 * i + 6]
        h = _layer_norm(tokens) * (1 + scale_a) + shift_a
        q, k, v = block.attention.qkv(h).split(width, dim=-1)
        mixed = []
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            scores = q[..., part] @ k[..., part].mT / math.sqrt(width / heads)
            mixed.append(scores.softmax(-1) @ v[..., part])
        tokens = tokens + gate_a * block.attention.out(torch.cat(mixed, dim=-1))
        h = _layer_norm(tokens) * (1 + scale_m) + shift_m
        tokens = tokens + gate_m * block.mlp.contract(_gelu(block.mlp.expand(h)))
    shift, scale = projections[-2:]
    out = network.head.project(_layer_norm(tokens) * (1 + scale) + shift)
    torch.testing.assert_close(network(x, t), unpatchify(out, (2, 3), 2), rtol=1e-9, atol=1e-9)


def test_unet_equals_vdms_definition() -> None:
    torch.manual_seed(0)
    network = awake(build(UNetConfig(width=128, levels=2), (3, 3, 4), 256)).double().eval()
    weights = dict(network.named_parameters())

    def layer(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return weights[f"{name}.weight"], weights[f"{name}.bias"]

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.group_norm(h, 32, *layer(name), eps=1e-6)

    def conv(h: torch.Tensor, name: str, padding: int = 1) -> torch.Tensor:
        return torch.nn.functional.conv2d(h, *layer(name), padding=padding)  # padding with zeros

    def block(h: torch.Tensor, name: str) -> torch.Tensor:
        shortcut = conv(h, f"{name}.shortcut", padding=0) if h.shape[1] == 256 else h
        h = conv(silu(norm(h, f"{name}.norm_in")), f"{name}.conv_in") + next(shifts)[..., None, None]
        return shortcut + conv(silu(norm(h, f"{name}.norm_out")), f"{name}.conv_out")

    x, t = (v.double() for v in batch(network))
    condition = silu(linear(network.condition.embed(t), *layer("condition.expand")))
    condition = silu(linear(condition, *layer("condition.mix")))
    shifts = iter(linear(condition, weights["project.weight"]).split(128, dim=1))
    skips = [conv(network.fourier(x), "stem")]
    for i in range(2):
        skips.append(block(skips[-1], f"down.{i}"))
    h = block(skips[-1], "before")
    q, k, v = linear(norm(h, "attention.norm").flatten(2).mT, *layer("attention.qkv")).split(128, dim=-1)
    mixed = (q @ k.mT / math.sqrt(128)).softmax(-1) @ v  # one head, over all pixels
    h = block(h + linear(mixed, *layer("attention.out")).mT.reshape(h.shape), "after")
    for i in range(3):
        h = block(torch.cat([h, skips.pop()], dim=1), f"up.{i}")
    expected = conv(silu(norm(h, "head.norm")), "head.conv")
    torch.testing.assert_close(network(x, t), expected, rtol=1e-9, atol=1e-9)


def test_coarser_resolutions_reach_the_whole_image() -> None:
    network = awake(tiny("unet-coarser-2d", bins_count=None)).eval()
    met: list[tuple[int, ...]] = []
    for block in network.up:
        block.register_forward_hook(lambda _, args, out: met.append(tuple(out.shape[1:])) if len(args) > 1 else None)
    x, t = batch(network, 1)
    before = network(x, t)
    assert met == [(16, 1, 2)] * 3 + [(12, 2, 4)] * 3 + [(8, 4, 8)] * 3
    moved = x.clone()
    moved[..., 0, 0] += 1
    difference = (network(moved, t) - before).abs()
    assert difference.min() > 0, "one pixel changes every pixel of the output"
    assert len(difference.unique()) == difference.numel(), "and each differently"


@pytest.mark.parametrize(
    "config", [UNetConfig(width=32, levels=32), UNetConfig(width=32, levels=4, coarser=(48, 64))], ids=str
)
def test_unet_scales_its_skip_connections(config: UNetConfig) -> None:
    network = build(config, (3, 4, 4)).eval()
    seen = []
    network.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].std().item()))
    network(*batch(network))
    assert 0.2 < seen[0] < 5


@pytest.mark.parametrize(
    ("channels", "parts", "groups"),
    [(128, 1, 32), (512, 1, 32), (64, 1, 16), (12, 1, 3), (5, 1, 1), (256, 2, 32), (24, 2, 6), (12, 2, 2), (10, 2, 2)],
)
def test_group_norm_equals_torchs_for_each_concatenated_part(channels: int, parts: int, groups: int) -> None:
    """Of a shifted image, and so are its gradients."""
    torch.manual_seed(0)
    norm = group_norm(channels, parts).double()
    assert norm.num_groups == groups
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    images = list(3 + torch.randn(parts, 2, channels // parts, 3, 5, dtype=torch.float64))
    shift = torch.randn(2, channels, dtype=torch.float64)
    inputs = [*(each.requires_grad_() for each in (*images, shift)), *norm.parameters()]
    shifted = torch.cat(images, dim=1) + shift[..., None, None]
    expected = torch.nn.functional.group_norm(shifted, groups, norm.weight, norm.bias, eps=1e-6)
    found, direction = torch.cat(norm.each(images, shift), dim=1), torch.randn_like(expected)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(each, inputs, direction) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_group_norm_in_16_bits_has_float32_moments() -> None:
    """Far from 0, moments in bfloat16 would have no digit of the variance."""
    norm, x = GroupNorm(2, 8), (100 + torch.randn(2, 8, 3, 3)).bfloat16()
    assert norm(x).dtype == torch.float32
    torch.testing.assert_close(norm(x), norm(x.float()))


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 8, 8)])
def test_a_batch_of_another_shape_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=rf"\(3, 4, 6\).*\({shape[0]}, "):
        tiny("dit-2d")(torch.zeros(2, *shape), torch.zeros(2))


@pytest.mark.parametrize("kind", ["dit-2d", "unet-coarser-2d", "mlp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_converted_to_16_bits_agrees_with_autocast(kind: str, dtype: torch.dtype) -> None:
    """Embeddings of the condition and group norms stay in float32, and so does everything outside the network."""
    shape = TINY[kind][1]
    model = bsi.Model(awake(tiny(kind, num_classes=3)), bsi.BSI(), shape, data=bsi.Bins.uint8()).eval()
    psi, level, labels = batch(model.denoiser.backbone)[0], torch.tensor([0.02, 1.0, 1e4]), torch.tensor([0, 3, 1])
    with torch.autocast("cpu", dtype):
        expected = model.denoiser(psi, level, labels)
    before = model.denoiser(psi, level, labels)
    size = sum(p.nbytes for p in model.parameters())
    model.to(dtype)
    assert sum(p.nbytes for p in model.parameters()) < size
    found = model.denoiser(psi, level, labels)
    assert found.dtype == model.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert (found - before).norm() < 0.05 * before.norm()
    model(psi.clamp(-1, 1), labels).mean().backward()
    samples = model.sample(2, steps=2, label=1)
    assert (samples.dtype, samples.shape) == (torch.uint8, (2, *shape))
    assert model.float().denoiser(psi, level).dtype == torch.float32
