"""The networks: shapes, starts, conditioning, gradients, cost, and what they refuse."""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from bsi.backbones import Backbone, BackboneConfig, DiTConfig, MLPConfig, UNetConfig, build, cost, resolve
from bsi.backbones.config import DIT_SIZES, KNOWN_NAMES
from bsi.backbones.dit import patchify, unpatchify
from bsi.backbones.layers import group_norm
from bsi.errors import UsageError

TINY: dict[str, tuple[BackboneConfig, tuple[int, ...]]] = {
    "dit-1d": (DiTConfig(width=16, depth=2, heads=2, patch=4), (2, 8)),
    "dit-2d": (DiTConfig(width=16, depth=2, heads=2, patch=2), (3, 4, 6)),
    "dit-3d": (DiTConfig(width=16, depth=2, heads=4, patch=2), (1, 4, 2, 4)),
    "unet-1d": (UNetConfig(width=8, levels=2), (2, 6)),
    "unet-2d": (UNetConfig(width=8, levels=2), (3, 4, 6)),
    "unet-3d": (UNetConfig(width=8, levels=1), (1, 3, 3, 3)),
    "unet-coarser-1d": (UNetConfig(width=8, levels=2, coarser=(12,)), (2, 6)),
    "unet-coarser-2d": (UNetConfig(width=8, levels=2, heads=2, coarser=(12, 16)), (3, 4, 8)),
    "unet-coarser-3d": (UNetConfig(width=8, levels=1, coarser=(8,)), (1, 4, 2, 2)),
    "mlp": (MLPConfig(width=16, depth=2), (5,)),
    "mlp-2d": (MLPConfig(width=16, depth=2), (2, 3)),
}
every_kind = pytest.mark.parametrize("kind", TINY)


def awake(network: Backbone) -> Backbone:
    """The network with every parameter that starts at 0 moved away, as training would."""
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
def test_output_is_exactly_zero_at_the_start(kind: str) -> None:
    network = tiny(kind)
    x, t = batch(network)
    out = network(x, t)
    assert out.shape == x.shape
    assert out.dtype == torch.float32
    assert not out.any()


@pytest.mark.parametrize(
    ("kind", "zero"),
    [
        ("unet-coarser-2d", ("project.weight", "conv_out.weight", "attention.out.weight", "head.conv.weight")),
        ("dit-2d", ("modulation.project.weight", "head.project.weight")),
    ],
)
def test_what_starts_at_zero_is_what_was_published_so(kind: str, zero: tuple[str, ...]) -> None:
    weights = {name: weight for name, weight in tiny(kind).named_parameters() if weight.ndim > 1}
    assert {name for name, weight in weights.items() if not weight.any()} == {n for n in weights if n.endswith(zero)}


@every_kind
def test_the_first_step_moves_the_output_and_later_ones_everything(kind: str) -> None:
    """Zeros at the start must not be a place that gradients cannot leave."""
    network = tiny(kind)
    x, t = batch(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        (network(x, t) - 1).square().mean().backward()
        optimizer.step()
    assert network(x, t).any()
    assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


@every_kind
def test_a_trained_network_depends_on_t(kind: str) -> None:
    network = tiny(kind, bins_count=None)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        x, t = torch.randn(16, *network.shape, generator=generator), torch.rand(16, generator=generator)
        optimizer.zero_grad()
        (network(x, t) - (t - 0.5).view(-1, *[1] * (x.ndim - 1))).square().mean().backward()
        optimizer.step()
    network.eval()
    rise = network(x, torch.full_like(t, 0.9)) - network(x, torch.full_like(t, 0.1))
    assert rise.mean() > 0.2  # of 0.8


@every_kind
def test_samples_of_a_batch_do_not_mix(kind: str) -> None:
    network = awake(tiny(kind)).eval()
    x, t = batch(network)
    torch.testing.assert_close(network(x, t)[1:2], network(x[1:2], t[1:2]), atol=1e-5, rtol=1e-4)


@every_kind
def test_gradients_agree_with_finite_differences_in_float64(kind: str) -> None:
    """Along random directions of input, precision and all parameters at once; the fastest sine of t limits the step."""
    network = awake(tiny(kind, bins_count=2)).double().eval()
    x, t = (v.double() for v in batch(network, 2))
    leaves = [x.requires_grad_(), t.requires_grad_(), *network.parameters()]
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def value() -> torch.Tensor:
        return (network(x, t) * weights).sum()

    gradients = torch.autograd.grad(value(), leaves)
    for _ in range(3):
        directions = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
        slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))
        step = 1e-7
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                for leaf, d in zip(leaves, directions, strict=True):
                    leaf += sign * step * d
                ends.append(value())
                for leaf, d in zip(leaves, directions, strict=True):
                    leaf -= sign * step * d
        torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), slope, rtol=1e-5, atol=1e-6)


@every_kind
def test_labels_matter_and_none_is_the_null_class(kind: str) -> None:
    network = awake(tiny(kind, num_classes=4)).eval()
    x, t = batch(network)
    labels = torch.tensor([0, 3, 1])
    assert not torch.isclose(network(x, t, labels), network(x, t)).all(dim=-1).any()
    assert network(x, t).equal(network(x, t, torch.full((3,), 4)))


def test_patchify_keeps_pixels_of_a_patch_together_and_unpatchify_undoes_it() -> None:
    x = torch.arange(2 * 3 * 4 * 6 * 2.0).view(2, 3, 4, 6, 2)
    tokens = patchify(x, 2)
    assert tokens.shape == (2, 6, 24)
    assert tokens[1, 4].equal(x[1, :, 2:4, 2:4, 0:2].flatten())
    assert unpatchify(tokens, (2, 3, 1), 2).equal(x)


def _layer_norm(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def test_dit_is_the_published_function_written_out() -> None:
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


def test_unet_is_vdms_written_out() -> None:
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


def test_attention_reaches_across_patches_and_positions_matter() -> None:
    network = awake(tiny("dit-2d", bins_count=None)).eval()
    x, t = batch(network, 1)
    moved = x.clone()
    moved[..., :2, :2] += 1
    assert (network(moved, t) - network(x, t))[..., 2:, 2:].abs().min() > 0
    rolled = x.roll(2, dims=-1)
    assert not torch.allclose(network(rolled, t), network(x, t).roll(2, dims=-1), atol=1e-3)


def test_unet_reads_the_skips_in_reverse_order() -> None:
    """The first up block is given the last down block's output, the last one the stem's."""
    network = awake(tiny("unet-2d")).eval()
    outputs, skips = [], []
    network.stem.register_forward_hook(lambda _, __, out: outputs.append(out))
    for block in network.down:
        block.register_forward_hook(lambda _, __, out: outputs.append(out))
    for block in network.up:
        block.register_forward_pre_hook(lambda _, args: skips.append(args[1]))
    network(*batch(network))
    assert len(outputs) == len(skips) == 3
    assert all(a is b for a, b in zip(outputs, reversed(skips), strict=True))


def test_a_unets_parts_are_made_in_one_order() -> None:
    """In which a seed's numbers are drawn: with another, a recipe would begin as another network than it did."""
    parts = dict.fromkeys(name.partition(".")[0] for name in tiny("unet-2d").state_dict())
    assert list(parts) == ["condition", "project", "stem", "down", "before", "attention", "after", "up", "head"]


def test_a_unet_at_several_resolutions_answers_every_image_with_one_of_its_size() -> None:
    """Skips meet the stream where they were taken: two levels and what came before them, at each resolution."""
    network = awake(tiny("unet-coarser-2d")).eval()
    met: list[tuple[int, ...]] = []
    for block in network.up:
        block.register_forward_hook(lambda _, args, out: met.append(tuple(out.shape[1:])) if len(args) > 1 else None)
    network(*batch(network))
    assert met == [(16, 1, 2)] * 3 + [(12, 2, 4)] * 3 + [(8, 4, 8)] * 3
    attending = [hasattr(layer, "attention") and layer.attention is not None for layer in (*network.down, *network.up)]
    assert sum(attending) == 2 * (2 + 3), "attention follows every block at a coarser resolution"


def test_coarser_resolutions_see_the_whole_image() -> None:
    """A pixel moves every pixel of the output, and each differently."""
    network = awake(tiny("unet-coarser-2d", bins_count=None)).eval()
    x, t = batch(network, 1)
    moved = x.clone()
    moved[..., 0, 0] += 1
    difference = (network(moved, t) - network(x, t)).abs()
    assert difference.min() > 0
    assert len(difference.unique()) == difference.numel()


@pytest.mark.parametrize(
    "config", [UNetConfig(width=32, levels=32), UNetConfig(width=32, levels=4, coarser=(48, 64))], ids=str
)
def test_unet_keeps_its_input_in_scale_on_the_way_up(config: UNetConfig) -> None:
    network = build(config, (3, 4, 4)).eval()
    seen = []
    network.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].std().item()))
    network(*batch(network))
    assert 0.2 < seen[0] < 5


@pytest.mark.parametrize(
    ("channels", "groups"), [(128, 32), (256, 32), (512, 32), (64, 16), (32, 8), (12, 3), (8, 2), (5, 1)]
)
def test_groups_are_32_or_have_at_least_four_channels(channels: int, groups: int) -> None:
    assert group_norm(channels).num_groups == groups


@pytest.mark.parametrize(("channels", "groups"), [(256, 32), (512, 32), (64, 16), (24, 6), (12, 2), (10, 2)])
def test_groups_do_not_cross_from_the_input_to_the_skip(channels: int, groups: int) -> None:
    norm = group_norm(channels, parts=2)
    assert norm.num_groups == groups
    x = torch.randn(3, channels, 4, 5, dtype=torch.float64)
    norm = norm.double()
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    expected = torch.nn.functional.group_norm(x, groups, norm.weight, norm.bias, norm.eps)
    parts = norm.each(list(x.chunk(2, dim=1)))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)
    torch.testing.assert_close(norm(x), expected)


@every_kind
@pytest.mark.parametrize("num_classes", [0, 10])
@pytest.mark.parametrize("bins_count", [None, 256])
def test_cost_counts_every_parameter(kind: str, bins_count: int | None, num_classes: int) -> None:
    config, shape = TINY[kind]
    real = sum(p.numel() for p in tiny(kind, bins_count, num_classes).parameters())
    assert cost(config, shape, bins_count, num_classes).parameters == real


@every_kind
def test_cost_counts_every_flop_of_a_forward_pass(kind: str) -> None:
    config, shape = TINY[kind]
    network = tiny(kind).eval()
    x, t = batch(network)
    # Written out as two products: the counter does not know the CPU's fused attention.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        network(x, t)
    assert counter.get_total_flops() == 3 * cost(config, shape, 256).flops


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("dit-mini/2", 9.7),
        ("dit-s/2", 32.4),
        ("dit-b/2", 129),
        ("dit-l/2", 457),
        ("dit-xl/2", 673),
        ("unet-128x32", 30.5),
        ("unet-128-256-256x2", 27.4),
    ],
)
def test_named_sizes_have_about_the_published_parameters(name: str, millions: float) -> None:
    with torch.device("meta"):
        network = build(name, (3, 32, 32), 256)
    real = sum(p.numel() for p in network.parameters())
    assert cost(resolve(name), (3, 32, 32), 256).parameters == real
    assert real / 1e6 == pytest.approx(millions, rel=0.005)


def test_the_papers_networks_have_the_papers_sizes() -> None:
    assert resolve("dit-l/2") == DiTConfig(width=1024, depth=24, heads=16, patch=2, dropout=0.05)
    assert resolve("DiT-L/4") == DiTConfig(width=1024, depth=24, heads=16, patch=4, dropout=0.05)
    assert resolve("unet-128x32") == UNetConfig(width=128, levels=32, heads=1, dropout=0.1)
    assert resolve("unet-256x32") == UNetConfig(width=256, levels=32, heads=1, dropout=0.1)
    assert resolve("unet-64-96-128x3") == UNetConfig(width=64, levels=3, coarser=(96, 128))
    assert resolve("mlp-64x3") == MLPConfig(width=64, depth=3)
    assert {name: (c.width, c.depth, c.heads) for name, c in DIT_SIZES.items() if name != "mini"} == {
        "s": (384, 12, 6),
        "b": (768, 12, 12),
        "l": (1024, 24, 16),
        "xl": (1152, 28, 16),
    }


@pytest.mark.parametrize("name", KNOWN_NAMES)
def test_every_known_name_resolves(name: str) -> None:
    resolve(name).check((3, 32, 32) if name.startswith(("dit", "unet")) else (2,))


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("dit-l2", "dit-l/2"),
        ("dit-xxl/2", "dit-xl/2"),
        ("unet128x32", "unet-128x32"),
        ("mlp", "mlp-256x4"),
        ("DIT-S-2", "dit-s/2"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_one(typo: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"Did you mean '{meant}'"):
        resolve(typo)


@pytest.mark.parametrize(
    ("config", "shape", "message"),
    [
        (DiTConfig(16, 1, 2, patch=4), (3, 32, 30), r"multiple of 4: got 32x30\. Use a patch of 1 or 2"),
        (DiTConfig(16, 1, 2, patch=2), (3,), "Use an MLP"),
        (UNetConfig(8, 1), (3,), "Use an MLP"),
        (
            UNetConfig(8, 1, coarser=(8, 8)),
            (3, 12, 6),
            r"3 resolutions .* multiple of 4: got 12x6\. Use at most 2, or crop",
        ),
        (UNetConfig(8, 1), (3, 2, 2, 2, 2), r"1 to 3 spatial axes.*Use a DiT \(dit-s/2\) for more axes"),
        (DiTConfig(6, 1, 2), (1, 2, 2, 2, 2), "positions on 4 axes need a width of at least 8.*got width=6"),
        (MLPConfig(8, 1), (), "got \\(\\)"),
        (MLPConfig(8, 1), (0,), "at least 1"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_anything_is_allocated(
    config: BackboneConfig, shape: tuple[int, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda _: pytest.fail("a module was made"))
    with pytest.raises(UsageError, match=message):
        build(config, shape)
    with pytest.raises(UsageError, match=message):
        cost(config, shape)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"width=100, heads=3\. Use 1, 2, 4 or 5 heads"):
        DiTConfig(width=100, depth=1, heads=3)
    with pytest.raises(UsageError, match="heads must divide width"):
        UNetConfig(width=10, heads=4)
    with pytest.raises(UsageError, match="got width=10, heads=4"):
        UNetConfig(width=8, heads=4, coarser=(10,))
    with pytest.raises(UsageError, match="depth must be at least 1: got 0"):
        DiTConfig(width=8, depth=0, heads=1)
    with pytest.raises(UsageError, match=r"\[0, 1\): got 1"):
        MLPConfig(dropout=1.0)
    with pytest.raises(UsageError, match="num_classes"):
        build(MLPConfig(8, 1), (2,), num_classes=-1)


@pytest.mark.parametrize("shape", [(1, 4, 6), (3, 8, 8)])
def test_a_batch_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=rf"\(3, 4, 6\), got a batch of \({shape[0]}, "):
        tiny("dit-2d")(torch.zeros(2, *shape), torch.zeros(2))


def test_configs_and_costs_need_no_torch() -> None:
    code = (
        "import sys, bsi.backbones as b; b.cost(b.resolve('dit-l/2'), (3, 32, 32)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_state_dict_holds_parameters_alone() -> None:
    """Positions and frequencies are functions of the config: a checkpoint does not carry them."""
    for kind in TINY:
        network = tiny(kind)
        assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}


def test_flops_of_a_dit_grow_as_stated() -> None:
    config, tokens, width = DiTConfig(width=64, depth=1, heads=4, patch=2), 16, 64
    deeper = DiTConfig(width=64, depth=2, heads=4, patch=2)
    block = cost(deeper, (1, 8, 8)).flops - cost(config, (1, 8, 8)).flops
    modulation = 2 * 6 * width**2
    assert block - modulation == 2 * tokens * width**2 * (3 + 1 + 2 * 4) + 4 * tokens**2 * width
    assert math.prod(config.grid((1, 8, 8))) == tokens
