"""The layers of the FID network: Inception of 2015-12-05 without its last one, 2048 features per image.

It follows the TensorFlow graph that published FIDs are computed with. It differs from the usual Inception v3 in
two places: the average pools of the blocks A, C and E do not count the padding, and the last block uses a maximum
instead. Modules are named as in pytorch-fid. There are no batch norms: `bsi.metrics.inception` folds them into the
convolutions.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Conv(nn.Conv2d):
    """A convolution with its folded batch norm, and a ReLU. At stride 1 it keeps the size unless `valid`."""

    def __init__(
        self, ins: int, outs: int, kernel: int | tuple[int, int] = 1, stride: int = 1, valid: bool = False
    ) -> None:
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid or stride > 1 else (height // 2, width // 2)
        super().__init__(ins, outs, (height, width), stride, padding)

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input), inplace=True)


def average(x: Tensor) -> Tensor:
    """3 x 3 mean over the pixels inside the image: the divisor shrinks at the border."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def halve(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=2)


class A(nn.Module):
    """35 x 35: windows of 1, 5 and 3 + 3 pixels."""

    def __init__(self, ins: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(ins, 64)
        self.branch5x5_1 = Conv(ins, 48)
        self.branch5x5_2 = Conv(48, 64, 5)
        self.branch3x3dbl_1 = Conv(ins, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3)
        self.branch_pool = Conv(ins, pooled)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(average(x))], 1)


class B(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, ins: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(ins, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(ins, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, halve(x)], 1)


class C(nn.Module):
    """17 x 17: windows of 7, each as a row and a column."""

    def __init__(self, ins: int, width: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(ins, 192)
        self.branch7x7_1 = Conv(ins, width)
        self.branch7x7_2 = Conv(width, width, (1, 7))
        self.branch7x7_3 = Conv(width, 192, (7, 1))
        self.branch7x7dbl_1 = Conv(ins, width)
        self.branch7x7dbl_2 = Conv(width, width, (7, 1))
        self.branch7x7dbl_3 = Conv(width, width, (1, 7))
        self.branch7x7dbl_4 = Conv(width, width, (7, 1))
        self.branch7x7dbl_5 = Conv(width, 192, (1, 7))
        self.branch_pool = Conv(ins, 192)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), seven, twice, self.branch_pool(average(x))], 1)


class D(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self, ins: int) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(ins, 192)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(ins, 192)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([three, seven, halve(x)], 1)


class E(nn.Module):
    """8 x 8: windows of 3 as a row and a column. The last of the two pools by maximum, a property of the first
    published graph that later implementations keep."""

    def __init__(self, ins: int, last: bool) -> None:
        super().__init__()
        self.last = last
        self.branch1x1 = Conv(ins, 320)
        self.branch3x3_1 = Conv(ins, 384)
        self.branch3x3_2a = Conv(384, 384, (1, 3))
        self.branch3x3_2b = Conv(384, 384, (3, 1))
        self.branch3x3dbl_1 = Conv(ins, 448)
        self.branch3x3dbl_2 = Conv(448, 384, 3)
        self.branch3x3dbl_3a = Conv(384, 384, (1, 3))
        self.branch3x3dbl_3b = Conv(384, 384, (3, 1))
        self.branch_pool = Conv(ins, 192)

    def forward(self, x: Tensor) -> Tensor:
        one = self.branch3x3_1(x)
        two = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.last else average(x)
        crosses = [self.branch3x3_2a(one), self.branch3x3_2b(one), self.branch3x3dbl_3a(two), self.branch3x3dbl_3b(two)]
        return torch.cat([self.branch1x1(x), *crosses, self.branch_pool(pooled)], 1)


class Network(nn.Module):
    """299 x 299 pixels in [-1, 1] to 2048 features: the mean over the last 8 x 8 positions."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, valid=True)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, valid=True)
        self.Mixed_5b = A(192, 32)
        self.Mixed_5c = A(256, 64)
        self.Mixed_5d = A(288, 64)
        self.Mixed_6a = B(288)
        self.Mixed_6b = C(768, 128)
        self.Mixed_6c = C(768, 160)
        self.Mixed_6d = C(768, 160)
        self.Mixed_6e = C(768, 192)
        self.Mixed_7a = D(768)
        self.Mixed_7b = E(1280, last=False)
        self.Mixed_7c = E(2048, last=True)

    def forward(self, x: Float[Tensor, "n 3 299 299"]) -> Float[Tensor, "n 2048"]:
        x = halve(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halve(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        return x.float().mean((2, 3))
