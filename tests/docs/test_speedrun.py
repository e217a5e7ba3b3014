"""docs/benchmarks/speedrun.py and carry.py: all candidates are valid recipes; a training is carried and resumed."""

import importlib
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bsi
from bsi.recipe import Ema, Every, Recipe, from_plain, to_plain
from bsi.runtime.checkpoint import find, read_tensors


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "benchmarks"))

    def load(name):
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return load


def test_every_candidate_is_a_recipe(script):
    speedrun = script("speedrun")
    for goal, candidates in speedrun.CANDIDATES.items():
        for words in candidates:
            recipe = speedrun.BASES[goal].changed(words).recipe(goal, steps=1000)
            stored = from_plain(Recipe, to_plain(recipe))
            assert to_plain(stored) == to_plain(recipe)
    with pytest.raises(SystemExit, match="wide"):
        speedrun.Setting().changed("wide=3")


def test_the_flat_schedule_is_constant_and_then_falls_to_zero(script):
    recipe = script("speedrun").Setting(flat=0.5, lr=1e-2).recipe("bpd", steps=1000)
    rates = [recipe.rate(step) for step in (0, 20, 500, 750, 999)]
    assert rates == pytest.approx([1e-8, 1e-2, 1e-2, 5e-3, 2e-5])


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A digits network that was interrupted after four of six steps."""
    recipe = replace(
        bsi.recipes.digits(), steps=6, batch=16, ema=Ema(beta=0.5, start=1, powers=(0.1,)),
        every=Every(journal=1, evaluate=0, sample=0, checkpoint=0),
    )  # fmt: skip

    def stop(record):
        if record["step"] == 4:
            signal.raise_signal(signal.SIGTERM)

    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(SystemExit):
        bsi.train(recipe, out=out, sinks=[stop])
    return recipe, out


@pytest.mark.parametrize("only", [(), ("model",)], ids=["the whole state", "the weights"])
def test_a_training_is_carried_and_resumed(script, stopped, tmp_path, only):
    carry, (recipe, run) = script("carry"), stopped
    carry.pack_run(run, tmp_path / "parts", only)
    carry.unpack(tmp_path / "parts", tmp_path)
    before, after = (find(folder / "checkpoints", print) for folder in (run, tmp_path / "run"))
    assert after.step == 4
    for group in ("model", "ema"):
        expected = read_tensors(before, group if not only else "model")
        for name, tensor in read_tensors(after, group).items():
            torch.testing.assert_close(tensor, expected[name], rtol=2**-8, atol=0)
    momenta = {n: t for n, t in read_tensors(after, "optimizer").items() if n.startswith("momentum/")}
    assert momenta
    assert all(bool(t.any()) != bool(only) for t in momenta.values())
    finished = bsi.train(recipe, out=tmp_path / "run")
    assert [line["step"] for line in finished.journal()] == [1, 2, 3, 4, 5, 6]


def test_files_are_carried_bit_for_bit_in_pieces(script, tmp_path, monkeypatch):
    carry = script("carry")
    monkeypatch.setattr(carry, "PIECE", 4096)
    content = torch.randint(256, (9000,), dtype=torch.uint8).numpy().tobytes()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "a.npz").write_bytes(content)
    carry.pack([tmp_path / "store"], tmp_path / "parts", tmp_path)
    assert len(list((tmp_path / "parts").iterdir())) == 5  # a tar is a multiple of 10,240 bytes
    carry.unpack(tmp_path / "parts", tmp_path / "there")
    assert (tmp_path / "there" / "store" / "a.npz").read_bytes() == content
    monkeypatch.setattr(carry, "MOST", 2)
    with pytest.raises(SystemExit, match="too much"):
        carry.pack([tmp_path / "store"], tmp_path / "parts", tmp_path)
