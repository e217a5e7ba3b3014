"""Tensors moved towards others by a share on the device."""

import pytest
import torch

from bsi.runtime.ema import lerp_


@pytest.mark.parametrize("large", [1, 4, 2**20])  # all of them one by one, some, none
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_each_tensor_moves_its_share_of_the_way(large: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ema, "LARGE", large)
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
        if share == 0:
            assert torch.equal(tensor, start)
        else:
            torch.testing.assert_close(tensor, start + share * (end - start), rtol=1e-6, atol=1e-6)


def test_an_average_over_many_steps_stays_where_it_is() -> None:
    """Had the two factors a sum that is not 1, it would drift off."""
    average, value = torch.full((3,), 0.3), torch.full((3,), 0.3)
    for share in (1e-4, 3e-4, 7e-5):
        for _ in range(2000):
            lerp_([average], [value], torch.tensor(share))
    torch.testing.assert_close(average, value, rtol=1e-7, atol=0)


def test_nothing_to_move_is_no_fault() -> None:
    lerp_([], [], torch.tensor(0.5))
