"""Animations of samples: in the report and by `bsi sample --animate`."""

import pytest
import torch

import bsi
from bsi.evaluation import samples
from bsi.sampler import Sampler


class Zero(torch.nn.Module):
    def forward(self, input, t):
        return torch.zeros_like(input)


@pytest.mark.parametrize("method", [bsi.BSI(), bsi.BFN(), bsi.VDM()], ids=repr)
def test_an_animation_shows_belief_means_and_not_latents(method, tmp_path, monkeypatch):
    """The first latent of a VDM is 12 times smaller than the belief mean."""
    shown = []
    monkeypatch.setattr(samples, "belief_frames", lambda moments, low, high: shown.extend(moments) or [])
    monkeypatch.setattr(samples, "animate", lambda frames, path, lossless: None)
    model = bsi.Model(Zero(), method, (1, 4, 4))
    sampler = Sampler(steps=3)
    samples.animate_beliefs(model, sampler, 0, None, 2, tmp_path / "x.webp")
    steps = list(model.trajectory(range(2), sampler))
    assert [moment.precision for moment in shown] == [float(step.level) for step in steps]
    for moment, step in zip(shown, steps, strict=True):
        signal = float(method.encoder(step.level).signal) if isinstance(method, bsi.VDM) else 1.0
        torch.testing.assert_close(torch.from_numpy(moment.belief), step.latent / signal)
        torch.testing.assert_close(torch.from_numpy(moment.prediction), step.x_hat)
    assert shown[-1].measurement is None
