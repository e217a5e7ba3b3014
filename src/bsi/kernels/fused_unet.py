"""A U-Net's blocks with one kernel between two convolutions, and an explicit backward pass.

The forward pass of a block is group_norm_act -> convolution -> group_norm_act -> convolution -> residual_sum. Apart
from its convolutions, a down block makes 7 passes over an image forward and 8 backward. Forward, each of the two norms
reads and writes one image, and the residual sum reads two and writes one. Backward, each norm's gradient reads two
images and writes one, and that of the first norm also reads two gradients that bypass the block: that of its output,
which it also sums for the bias, and that of its input as the skip of a later block. (For this purpose a block also
returns its input: the gradient of the skip is then added in the block's own backward pass.) An up block writes the
normed stream and the normed skip into one tensor, so that they need not be concatenated, and its shortcut is one
product of both that is fused with the residual sum.

Weights may be float32: those of all blocks are rounded at once.

The lean form does not store the inputs of the convolutions for the backward pass, but recomputes them. No convolution
is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from bsi.backbones.layers import Image, attend
from bsi.backbones.unet import GroupNorm, PixelAttention, Rows, UNet, UNetBlock, bias_of, convolve, to_image, to_rows
from bsi.kernels import unet_kernels as kernels
from bsi.kernels.unet_kernels import GroupMoments


def rows_of(x: Image) -> Rows:
    """One row of channels for each pixel, without a copy if the image is channels-last."""
    return to_rows(x).contiguous()


def convolve_backward(dy: Image, x: Image, weight: Tensor) -> tuple[Image, Tensor]:
    """The gradients of the inputs of `convolve`."""
    dim = weight.ndim - 2
    stride = padding = dilation = [1] * dim
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0] * dim, 1, [True, True, False]
    )
    return dx, dweight


def slices(whole: Tensor, images: list[Rows]) -> tuple[Tensor, ...]:
    """The parts of a tensor that belong to each of several images, whose channels are concatenated in it."""
    return whole.split([image.shape[2] for image in images], dim=-1)


def norm_each(images: list[Rows], weight: Tensor, bias: Tensor, groups: int) -> tuple[Rows, list[GroupMoments]]:
    """SiLU of the norm of several images, concatenated, and their moments."""
    batch, count, _ = images[0].shape
    y = images[0].new_empty(batch, count, len(weight))
    parts = zip(images, *(slices(whole, images) for whole in (weight, bias, y)), strict=True)
    return y, [kernels.group_norm_act(image, w, b, groups // len(images), out) for image, w, b, out in parts]


class _Block(torch.autograd.Function):
    """`UNetBlock` without its attention; returns its output and x. `shift` contains the first convolution's bias.

    `rounded` are the weights of the convolutions in the compute dtype: conv_in, conv_out and shortcut.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Image, skip: Image | None, shift: Tensor,
        weight_in: Tensor, bias_in: Tensor, conv_in: Tensor, weight_out: Tensor, bias_out: Tensor, conv_out: Tensor,
        bias: Tensor, shortcut: Tensor | None,
        rounded: Sequence[Any], groups: tuple[int, int], dropout: float, seed: Tensor | None, lean: bool,
    ) -> tuple[Image, Image]:  # fmt: skip
        images = [rows_of(x)] if skip is None else [rows_of(x), rows_of(skip)]
        half_in, half_out, half_shortcut = rounded
        y_in, moments_in = norm_each(images, weight_in, bias_in, groups[0])
        h = rows_of(convolve(to_image(y_in, x), half_in))
        y_out = torch.empty_like(h)
        moments_out = kernels.group_norm_act(h, weight_out, bias_out, groups[1], y_out, True, shift, dropout, seed)
        branch = rows_of(convolve(to_image(y_out, x), half_out))
        if half_shortcut is None:
            out = kernels.residual_sum(images[0], branch, bias)
        else:
            out = kernels.residual_sum_with_skip(images[0], images[1], half_shortcut.flatten(1), branch, bias)
        kept = (None, None) if lean else (y_in, y_out)
        moments = [tensor for each in (moments_out, *moments_in) for tensor in each]
        ctx.save_for_backward(
            x, skip, h, *kept, *rounded, shift, weight_in, bias_in, weight_out, bias_out, seed, *moments
        )
        ctx.settings = groups, dropout, conv_in.dtype, bias.dtype
        ctx.set_materialize_grads(False)
        return to_image(out, x), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Image, dpast: Image | None) -> tuple[Tensor | None, ...]:
        x, skip, h, y_in, y_out, conv_in, conv_out, shortcut, shift, *rest = ctx.saved_tensors
        weight_in, bias_in, weight_out, bias_out, seed, *moments = rest
        groups, dropout, dtype, bias_dtype = ctx.settings
        images = [rows_of(x)] if skip is None else [rows_of(x), rows_of(skip)]
        moments_out, *moments_in = (GroupMoments(*moments[i : i + 3]) for i in range(0, len(moments), 3))
        drows, inputs = rows_of(dout), len(weight_in)
        sums = torch.empty(len(x), 4, inputs + len(weight_out), dtype=torch.float32, device=x.device)
        if y_out is None:
            y_out = torch.empty_like(h)
            kernels.group_norm_act(h, weight_out, bias_out, groups[1], y_out, True, shift, dropout, seed)
        dy_out, dconv_out = convolve_backward(to_image(drows, x), to_image(y_out, x), conv_out)
        del y_out
        dh = kernels.group_norm_act_backward(
            rows_of(dy_out), h, moments_out, weight_out, bias_out, groups[1], sums[:, :, inputs:], True, dropout, seed
        )
        del dy_out
        y_in = norm_each(images, weight_in, bias_in, groups[0])[0] if y_in is None else y_in
        dy_in, dconv_in = convolve_backward(to_image(dh, x), to_image(y_in, x), conv_in)
        del y_in
        past: tuple[Rows, ...] = (drows,)
        dshortcut = None
        if shortcut is not None:
            flat = drows.flatten(0, 1)
            past = slices(drows @ shortcut.flatten(1), images)
            dweights = [flat.t() @ image.flatten(0, 1) for image in images]
            dshortcut = torch.cat(dweights, dim=1).view_as(shortcut).to(dtype)
        more = [None if dpast is None else rows_of(dpast), *[None] * (len(images) - 1)]
        shared = (rows_of(dy_in), weight_in, bias_in, sums[:, :, :inputs])
        parts = zip(images, moments_in, past, more, *(slices(whole, images) for whole in shared), strict=True)
        dx, *dskip = (
            kernels.group_norm_act_backward(dy, image, m, w, b, groups[0] // len(images), out, add=add, more=also)
            for image, m, add, also, dy, w, b, out in parts
        )
        dweight, dbias, _, added = sums.sum(0)
        dbranch = added[:inputs] if shortcut is None else kernels.pixel_sums(drows).sum(0)
        return (
            to_image(dx, x), to_image(dskip[0], x) if dskip else None, sums[:, 2, inputs:].to(shift.dtype),
            dweight[:inputs], dbias[:inputs], dconv_in.to(dtype), dweight[inputs:], dbias[inputs:], dconv_out.to(dtype),
            dbranch.to(bias_dtype), dshortcut, None, None, None, None, None,
        )  # fmt: skip


class _Norm(torch.autograd.Function):
    """The norm of one image, with or without SiLU."""

    @staticmethod
    def forward(ctx: Any, x: Image, weight: Tensor, bias: Tensor, groups: int, act: bool) -> Image:
        rows = rows_of(x)
        y = torch.empty_like(rows)
        ctx.save_for_backward(x, weight, bias, *kernels.group_norm_act(rows, weight, bias, groups, y, act))
        ctx.settings = groups, act
        return to_image(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Image) -> tuple[Tensor | None, ...]:
        x, weight, bias, *moments = ctx.saved_tensors
        (groups, act), rows = ctx.settings, rows_of(x)
        sums = torch.empty(len(x), 4, len(weight), dtype=torch.float32, device=x.device)
        dx = kernels.group_norm_act_backward(rows_of(dy), rows, GroupMoments(*moments), weight, bias, groups, sums, act)
        dweight, dbias, _, _ = sums.sum(0)
        return to_image(dx, x), dweight, dbias, None, None


class _Linear(torch.autograd.Function):
    """A linear layer. The sum for the gradient of its bias is fifteen times as fast as PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Rows, weight: Tensor, bias: Tensor) -> Rows:
        half = weight.to(x.dtype)
        ctx.save_for_backward(x, half)
        ctx.settings = weight.dtype, bias.dtype
        return linear(x, half, bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Rows) -> tuple[Tensor, ...]:
        x, half = ctx.saved_tensors
        dy = dy.contiguous()
        dweight = dy.flatten(0, 1).t() @ x.flatten(0, 1)
        return dy @ half, dweight.to(ctx.settings[0]), kernels.pixel_sums(dy).sum(0).to(ctx.settings[1])


def fused_norm(norm: GroupNorm, x: Image, act: bool = False) -> Image:
    """The norm of an image, in the image's dtype, followed by SiLU if `act`."""
    return _Norm.apply(x, norm.weight, norm.bias, norm.num_groups, act)


def fused_attention(attention: PixelAttention, x: Image) -> Image:
    qkv, out = attention.qkv, attention.out
    mixed = attend(_Linear.apply(rows_of(fused_norm(attention.norm, x)), qkv.weight, qkv.bias), attention.heads)
    return x + to_image(_Linear.apply(mixed, out.weight, out.bias), x)


@torch.no_grad()
def round_weights(network: UNet, dtype: torch.dtype) -> dict[Tensor | None, Tensor]:
    """The weights of all blocks' convolutions, rounded to `dtype` at once."""
    layers = (layer for block in network.blocks() for layer in (block.conv_in, block.conv_out, block.shortcut))
    weights: list[Tensor] = [layer.weight for layer in layers if layer is not None]
    rounded = weights
    if weights[0].dtype != dtype:
        rounded = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(rounded, weights)
    return dict(zip(weights, rounded, strict=True))


@dataclass
class FusedUNet:
    """`UNet.fast`: everything between the first convolution and the last. x has the compute dtype."""

    lean: bool = False

    def __call__(self, network: UNet, x: Image, shifts: Tensor, seeds: Sequence[Tensor | None]) -> Image:
        rounded = round_weights(network, x.dtype)
        # The first convolutions' biases are added for all blocks at once.
        shifts = shifts + torch.cat([bias_of(block.conv_in).float() for block in network.blocks()])
        inputs = zip(shifts.split(network.widths, dim=1), seeds, strict=True)

        def run(block: UNetBlock, x: Image, skip: Image | None) -> tuple[Image, Image]:
            shift, seed = next(inputs)
            norms, shortcut, bias = (block.norm_in, block.norm_out), block.shortcut, bias_of(block.conv_out)
            if shortcut is not None:
                bias = bias + bias_of(shortcut)
            masters = block.conv_in.weight, block.conv_out.weight, None if shortcut is None else shortcut.weight
            out, x = _Block.apply(
                x, skip, shift, norms[0].weight, norms[0].bias, masters[0], norms[1].weight, norms[1].bias, masters[1],
                bias, masters[2], [rounded.get(weight) for weight in masters], [norm.num_groups for norm in norms],
                0.0 if seed is None else block.dropout, seed, self.lean,
            )  # fmt: skip
            return out if block.attention is None else fused_attention(block.attention, out), x

        x = network.walk(x, run, lambda x: fused_attention(network.attention, x))
        return fused_norm(network.head.norm, x, act=True)

    def freeze(self, network: UNet) -> None:
        """Nothing to prepare: weights that are already rounded are used as they are."""
