"""How many threads of a CPU pay off, and that a run says so."""

import time
from dataclasses import replace

import pytest
import torch

import bsi
from bsi.devices import seconds_by_threads


def busy(slow: int):
    """Work that takes 20 ms with this number of threads and none with any other, as on a busy machine."""
    return lambda: time.sleep(0.02 if torch.get_num_threads() == slow else 0.0)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_threads_are_compared_and_restored() -> None:
    seconds = seconds_by_threads(busy(3))
    assert list(seconds) == [1, 3]
    assert seconds[3] > 0.02 > seconds[1]
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    assert list(seconds_by_threads(busy(3))) == [1]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("slow", "threads", "said"), [(3, None, True), (1, None, False), (3, 3, False)])
def test_a_run_says_when_one_thread_is_faster(slow, threads, said, monkeypatch, tmp_path, capfd) -> None:
    """And computes with the threads that it was given: other sums would be rounded differently."""
    plain, work = bsi.backbones.MLPConfig(8, 1), busy(slow)
    recipe = replace(bsi.recipes.digits(), backbone=plain, steps=1, batch=16, threads=threads)

    def network(self, features, t, cond):
        if not self.training:
            work()
        return torch.zeros(len(features), *self.shape) * sum(p.sum() for p in self.parameters())

    monkeypatch.setattr("bsi.backbones.mlp.MLP.network", network)
    quiet = replace(recipe, every=replace(recipe.every, evaluate=0, sample=0))
    bsi.train(quiet, out=tmp_path / "run", device="cpu")
    assert ("Start with --threads 1" in capfd.readouterr().err) == said
    assert torch.get_num_threads() == 3
