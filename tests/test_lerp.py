"""Tensors moved towards others by a share on the device."""

import pytest
import torch

from bsi.training import lerp
from bsi.training.lerp import lerp_


@pytest.mark.parametrize("large", [1, 4, 2**20])  # all of them one by one, some, none
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_each_tensor_moves_its_share_of_the_way_and_both_ends_are_exact(
    large: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerp, "LARGE", large)
    torch.manual_seed(0)
    shapes = [(), (3,), (2, 5), (7, 1, 2)]
    before, ends = ([torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(2))
    before[1], ends[1] = before[1].float(), ends[1].float()
    tensors = [tensor.clone() for tensor in before]
    kept = [end.clone() for end in ends]
    lerp_(tensors, ends, torch.tensor(share))
    for tensor, start, end, untouched in zip(tensors, before, ends, kept, strict=True):
        assert tensor.dtype == start.dtype
        assert torch.equal(end, untouched)
        if share in (0.0, 1.0):
            assert torch.equal(tensor, end if share else start)
        else:
            torch.testing.assert_close(tensor, start + share * (end - start), rtol=1e-6, atol=1e-6)


def test_nothing_to_move_is_no_fault() -> None:
    lerp_([], [], torch.tensor(0.5))
