"""Group normalization of images that lie channels-last, in one pass for the moments and one for the result.

    y = x scale + offset,   scale = w (var + eps)^(-1/2),   offset = b - (mean - shift) scale

is the norm of x + shift, where mean and var are those of a group of channels and shift is one number per channel. The
moments of each channel come first, then the groups': the mean of the means (each with its shift), and the mean of the
variances plus the variance of the means. x + shift is never formed, and the gradient too takes one pass for its sums
and one for the result: the shift's gradient follows from those sums, by way of mean and offset. The compiler would
otherwise copy every image into the other order and back. Moments, scale and offset are in float32 (or wider, as x is).
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

NORM_EPS = 1e-6  # as VDM's (Flax's default)


class GroupNorm(nn.GroupNorm):
    """Group normalization that leaves a channels-last image as it lies in memory; the result is in float32."""

    def forward(
        self, x: Float[Tensor, "batch channels *space"], shift: Float[Tensor, "batch channels"] | None = None
    ) -> Float[Tensor, "batch channels *space"]:
        """The norm of x + shift."""
        return self.each([x], shift)[0]

    def each(
        self, images: list[Float[Tensor, "batch _ *space"]], shift: Float[Tensor, "batch channels"] | None = None
    ) -> list[Float[Tensor, "batch _ *space"]]:
        """The norm of images that lie apart, as if their channels were one image's: only their moments are joined."""
        groups = self.num_groups, self.num_channels // self.num_groups
        rows = [pixels(wide(image)) for image in images]
        moments = zip(*(torch.var_mean(part, dim=1, correction=0) for part in rows), strict=True)
        var, mean = (torch.cat(parts, dim=1).unflatten(1, groups) for parts in moments)
        shifts = torch.zeros_like(mean) if shift is None else wide(shift).unflatten(1, groups)
        mean = mean + shifts
        center = mean.mean(2, keepdim=True)
        var = var.mean(2, keepdim=True) + (mean - center).square().mean(2, keepdim=True)
        scale = torch.rsqrt(var + self.eps) * self.weight.view(groups)
        offset = self.bias.view(groups) - (center - shifts) * scale
        sizes = [image.shape[1] for image in images]
        factors = (part.flatten(1)[:, None].split(sizes, dim=2) for part in (scale, offset))
        return [on_pixels(r * s + o, x) for r, s, o, x in zip(rows, *factors, images, strict=True)]


def wide(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def pixels(x: Float[Tensor, "batch channels *space"]) -> Float[Tensor, "batch pixels channels"]:
    """A row of channels for each pixel: a view of a channels-last image."""
    return x.flatten(2).transpose(1, 2)


def on_pixels(
    rows: Float[Tensor, "batch pixels channels"], like: Float[Tensor, "batch _ *space"]
) -> Float[Tensor, "batch channels *space"]:
    """Back to an image of `like`'s height and width."""
    return rows.transpose(1, 2).unflatten(2, like.shape[2:])


def group_norm(channels: int, parts: int = 1) -> GroupNorm:
    """32 groups, or fewer where they would have less than four channels (the paper's narrowest have four).

    A group of one channel would subtract the condition, which is added to whole channels, as part of the mean. Each of
    `parts` equal parts of the channels has whole groups.
    """
    fitting = (g for g in range(parts, 33) if channels % g == 0 and g % parts == 0)
    return GroupNorm(max(g for g in fitting if 4 * g <= channels or g == parts), channels, eps=NORM_EPS)
