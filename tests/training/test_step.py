"""A step: its batch is a function of seed and count, its update that of AdamW; a nonfinite step changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bsi
from bsi import recipes
from bsi.backbones import build
from bsi.data.batches import as_source
from bsi.objective import training_loss
from bsi.recipe import Ema, Optimizer, Recipe
from bsi.rng import derive
from bsi.runtime.distributed import Place, Watchdog, World
from bsi.runtime.ema import exponent
from bsi.training.step import Batch, Engine, Piece, Stream, piece_ids, piece_levels, pieces, tree_sum

CPU = World(Place(), torch.device("cpu"))
DATA = torch.randint(0, 17, (100, 1, 4, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


class Tiny(nn.Module):
    """A network with dropout, so that its random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(17, 8), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.inner(torch.cat([x.flatten(1), t[:, None]], 1)))
        return self.outer(nn.functional.dropout(h, 0.2, self.training)).view_as(x)


def tiny_recipe(**changes) -> Recipe:
    recipe = replace(
        recipes.digits(),
        backbone=None,
        batch=16,
        virtual_shards=8,
        steps=40,
        ema=Ema(0.9, 3),
        optimizer=Optimizer(1e-2),
    )
    return replace(recipe, **changes)


def engine_of(recipe: Recipe) -> Engine:
    torch.manual_seed(0)
    model = bsi.Model(Tiny(), bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17))
    return Engine(recipe, model.train(), CPU, None)


def stream_of(recipe: Recipe, start: int = 0) -> Stream:
    return Stream(recipe, as_source(DATA), (1, 4, 4), CPU, start)


@pytest.fixture
def watchdog():
    with Watchdog(Place(), 600.0) as watchdog:
        yield watchdog


def trained(recipe: Recipe, steps: int, watchdog: Watchdog, engine: Engine | None = None) -> tuple[Engine, Stream]:
    """An engine after these steps, and its stream."""
    engine, stream = engine or engine_of(recipe), stream_of(recipe)
    for _ in range(steps):
        engine.step(stream, watchdog)
    return engine, stream


def state(engine: Engine) -> dict[str, torch.Tensor]:
    return {f"{file}/{name}": t for file, group in engine.tensors().items() for name, t in group.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 2), (1, 8), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_the_pieces_of_all_ranks_are_the_global_batch(world: int, accumulation: int) -> None:
    recipe = tiny_recipe(accumulation=accumulation)
    cut = [piece for rank in range(world) for piece in pieces(recipe, 5, rank, world)]
    ids = np.concatenate([piece_ids(recipe, 100, piece) for piece in cut])
    t = torch.cat([piece_levels(recipe, piece) for piece in cut])
    whole = Piece(5, 0, 0, 16)
    assert np.array_equal(ids, piece_ids(recipe, 100, whole))
    assert torch.equal(t, piece_levels(recipe, whole))
    assert len(cut) == world * accumulation
    audited = [piece for rank in range(world) for piece in pieces(replace(recipe, audit=True), 5, rank, world)]
    assert audited == [Piece(5, shard, 2 * shard, 2) for shard in range(8)], "in the audit mode, shard by shard"


def test_levels_are_stratified_over_the_global_batch_and_differ_from_step_to_step() -> None:
    recipe = tiny_recipe()
    levels = [torch.sort(piece_levels(recipe, Piece(step, 0, 0, 16))).values for step in range(50)]
    for t in levels:
        assert torch.allclose(torch.diff(t), torch.full((15,), 1 / 16, dtype=torch.float64))
    first = torch.stack([t[0] for t in levels]) * 16
    assert 0.35 < float(first.mean()) < 0.65, "the shared offset is uniform"
    assert len(first.unique()) == 50


def test_noise_belongs_to_a_position_of_the_stream_not_to_a_batch() -> None:
    (once,) = stream_of(tiny_recipe()).step(0)
    cut = list(stream_of(tiny_recipe(accumulation=4)).step(0))
    assert torch.equal(once.eps, torch.cat([batch.eps for batch in cut]))
    assert torch.equal(once.data, torch.cat([batch.data for batch in cut]))
    (other,) = stream_of(tiny_recipe(seed=1)).step(0)
    assert not torch.isclose(once.eps, other.eps).any(), "and to the run's seed"
    assert abs(float(once.eps.mean())) < 4 / math.sqrt(once.eps.numel())


def test_seeds_for_different_purposes_and_places_are_unrelated() -> None:
    seeds = {derive(seed, what, n) for seed in range(20) for what in ("noise", "levels", "init") for n in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive(0, "noise") == 7239039022946701527, "later versions must resume runs: this value must never change"


def test_dropout_draws_from_another_seed_in_every_piece() -> None:
    recipe, seeds = tiny_recipe(accumulation=4), []
    stream = stream_of(recipe)
    with torch.random.fork_rng():
        for step in (0, 1):
            seeds += [torch.initial_seed() for _ in stream.step(step)]
        stream.first(0)
        assert torch.initial_seed() == seeds[0]
    assert len(set(seeds)) == 8


def test_flips_follow_the_position() -> None:
    plain = next(iter(stream_of(tiny_recipe()).step(0)))
    recipe = tiny_recipe(data=replace(tiny_recipe().data, flips=True))
    flipped = next(iter(stream_of(recipe).step(0)))
    mirrored = [
        torch.equal(b, a.flip(-1)) and not torch.equal(a, b) for a, b in zip(plain.data, flipped.data, strict=True)
    ]
    unchanged = [torch.equal(a, b) for a, b in zip(plain.data, flipped.data, strict=True)]
    assert all(m or u for m, u in zip(mirrored, unchanged, strict=True))
    assert 0 < sum(mirrored) < 16


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_a_training_step_equals_a_plain_pytorch_step(watchdog: Watchdog, clip: float) -> None:
    """Clipped gradient of the mean loss, AdamW, EMA: the same numbers as torch's own functions in sequence."""
    recipe = tiny_recipe(optimizer=Optimizer(1e-2, clip=clip, warmup=2, schedule="cosine"))
    engine, stream = engine_of(recipe), stream_of(recipe)
    model = copy.deepcopy(engine.model)
    reference = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=1e-2, fused=True)
    average = copy.deepcopy(model)
    for step in range(6):
        (batch,) = stream_of(recipe, step).step(step)
        x = model.values(batch.data)
        loss = training_loss(model.method, model.denoiser, x, batch.t, batch.eps).mean()
        reference.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        reference.param_groups[0]["lr"] = recipe.rate(step)
        reference.step()
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.data.copy_(p.data if step + 1 <= 3 else 0.9 * a.data + 0.1 * p.data)
        engine.step(stream, watchdog)
    for mine, theirs in ((engine.model, model), (engine.ema.model, average)):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert not torch.equal(next(iter(engine.ema.model.parameters())), next(iter(engine.model.parameters())))


def test_power_averages_weight_each_step_by_their_profile(watchdog: Watchdog) -> None:
    recipe = tiny_recipe(ema=Ema(0.9, 3, powers=(0.1,), snapshot=10))
    engine, stream, expected = engine_of(recipe), stream_of(recipe), torch.zeros(8, 17, dtype=torch.float64)
    for step in range(1, 7):
        engine.step(stream, watchdog)
        stays = (1 - 1 / step) ** (exponent(0.1) + 1)
        expected = stays * expected + (1 - stays) * engine.parameters[0].detach().double()
    assert torch.allclose(engine.powers.state()["0.1/inner.weight"].double(), expected, atol=1e-6)


@pytest.mark.parametrize("audit", [False, True])
def test_accumulation_changes_only_rounding(watchdog: Watchdog, audit: bool) -> None:
    """Without dropout, whose masks depend on the pieces."""

    def without_dropout(recipe: Recipe) -> Engine:
        engine = engine_of(recipe)
        engine.model.denoiser.backbone.eval()
        return trained(recipe, 5, watchdog, engine)[0]

    whole, cut = without_dropout(tiny_recipe()), without_dropout(tiny_recipe(accumulation=4, audit=audit))
    for a, b in zip(whole.parameters, cut.parameters, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    # AdamW makes the same update for a multiple of the gradient, so its norm is compared
    assert astuple(cut.means()) == pytest.approx(astuple(whole.means()), rel=1e-5)


def test_the_saved_state_is_complete(watchdog: Watchdog) -> None:
    """A new engine with these tensors continues, bit for bit."""
    recipe = tiny_recipe()
    engine, stream = trained(recipe, 7, watchdog)
    saved = copy.deepcopy(engine.tensors())
    resumed = engine_of(replace(recipe, seed=0))
    resumed.restore(7, saved)
    again = stream_of(recipe, 7)
    for _ in range(5):
        engine.step(stream, watchdog)
        resumed.step(again, watchdog)
    assert same(state(engine), state(resumed))
    assert engine.means() == resumed.means()


def test_the_state_of_a_checkpoint_is_a_copy(watchdog: Watchdog) -> None:
    engine, stream = trained(tiny_recipe(), 1, watchdog)
    saved = state(engine)
    then = copy.deepcopy(saved)
    engine.step(stream, watchdog)
    assert same(saved, then), "it is written while training continues"
    assert not same(saved, state(engine))


class Counting(Tiny):
    """A network with running statistics, which change in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x.flatten(1)).view_as(x), t)


@pytest.fixture
def two() -> Iterator[World]:
    """A world in which DDP assumes two ranks and sums over one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(Place(0, 2), torch.device("cpu"))
    dist.destroy_process_group()


def test_the_warm_up_of_ddp_changes_no_state(two: World) -> None:
    """Every start of a run makes it, so a resumed run has made one more."""
    model = bsi.Model(Counting(), bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17))
    engine = Engine(tiny_recipe(), model.train(), two, None)
    before = state(engine)
    engine.begin(Stream(tiny_recipe(), as_source(DATA), (1, 4, 4), two, 0))
    engine.close()
    assert same(before, state(engine))
    assert all(p.grad is None for p in model.parameters())


def test_ranks_exchange_gradients_once_per_step(
    watchdog: Watchdog, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the gradients of later pieces would stay on one rank, and the weights would diverge."""
    recipe = tiny_recipe(accumulation=4)
    model = bsi.Model(Tiny(), bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17))
    engine, stream = Engine(recipe, model.train(), two, None), Stream(recipe, as_source(DATA), (1, 4, 4), two, 0)
    engine.begin(stream)
    losses, exchanged = engine._losses, []

    def noted(batch: Batch) -> torch.Tensor:
        exchanged.append(engine.network.require_backward_grad_sync)
        return losses(batch)

    monkeypatch.setattr(engine, "_losses", noted)
    engine.step(stream, watchdog)
    engine.close()
    assert exchanged == [False, False, False, True]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient", "weights"])
def test_a_nonfinite_step_changes_no_state(watchdog: Watchdog, poison: float, where: str) -> None:
    engine, stream = trained(tiny_recipe(), 4, watchdog)
    before = copy.deepcopy(state(engine))
    losses = engine._losses
    handle = None
    if where == "loss":
        engine._losses = lambda batch: losses(batch) + poison  # type: ignore[method-assign]
    elif where == "gradient":
        handle = engine.parameters[1].register_hook(lambda grad: grad * poison)
    else:
        # type: ignore[method-assign]
        engine._losses = lambda batch: losses(batch) * torch.where(batch.t < 0.1, poison, 1.0)
    engine.step(stream, watchdog)
    engine.step(stream, watchdog)  # also nonfinite: the first one is reported
    engine._losses = losses  # type: ignore[method-assign]
    if handle is not None:
        handle.remove()
    assert same(state(engine), before)
    engine.step(stream, watchdog)
    assert same(state(engine), before), "nor later: the host may read the flag late"
    assert engine.first_fault() == 4
    means = engine.means()
    assert math.isfinite(means.loss)
    assert math.isfinite(means.grad_norm)


def test_float16_skips_overflows_and_halves_its_scale(watchdog: Watchdog) -> None:
    """Only the rule, on a CPU: the network computes in float32, and the overflow is simulated."""
    recipe = tiny_recipe()

    def of_ours(half: torch.dtype | None) -> Engine:
        torch.manual_seed(0)
        network = build("mlp-8x1", (1, 4, 4), 17)
        return Engine(recipe, bsi.Model(network, bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17)).train(), CPU, half)

    engine, stream = trained(recipe, 3, watchdog, of_ours(torch.float16))
    reference, _ = trained(recipe, 3, watchdog, of_ours(None))
    assert float(engine.scale) == 2.0**16
    for a, b in zip(engine.parameters, reference.parameters, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), "the scale cancels"
    before = [p.detach().clone() for p in engine.parameters]
    handle = engine.parameters[0].register_hook(lambda grad: grad * math.inf)
    engine.step(stream, watchdog)
    assert engine.first_fault() is None
    assert float(engine.scale) == 2.0**15
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters, before, strict=True))
    engine.scale = torch.tensor(1.0)
    engine.step(stream, watchdog)
    handle.remove()
    assert engine.first_fault() == 4, "at the smallest scale it is an error"

    engine, stream = of_ours(torch.float16), stream_of(recipe)
    losses = engine._losses
    engine._losses = lambda batch: losses(batch) + math.nan  # type: ignore[method-assign]
    engine.step(stream, watchdog)
    assert engine.first_fault() == 0, "a nonfinite loss is an error at any scale"


def test_float16_doubles_its_scale_after_a_number_of_finite_steps(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bsi.training.step.GROWTH_STEPS", 2)
    recipe = tiny_recipe()
    model = bsi.Model(build("mlp-8x1", (1, 4, 4), 17), bsi.BSI(), (1, 4, 4), bsi.Bins(-1.0, 1.0, 17))
    engine, stream, scales = Engine(recipe, model.train(), CPU, torch.float16), stream_of(recipe), []
    for _ in range(5):
        engine.step(stream, watchdog)
        scales.append(math.log2(float(engine.scale)))
    assert scales == [16, 17, 17, 18, 18]
    saved = copy.deepcopy(engine.tensors())
    resumed = Engine(recipe, copy.deepcopy(model), CPU, torch.float16)
    resumed.restore(5, saved)
    resumed.step(stream_of(recipe, 5), watchdog)
    engine.step(stream, watchdog)
    assert same(state(engine), state(resumed))
    assert float(resumed.scale) == float(engine.scale) == 2.0**19, "a resumed run has its scale"


def test_logged_means_are_over_the_steps_since_the_last_record(watchdog: Watchdog) -> None:
    engine, _ = trained(tiny_recipe(), 3, watchdog)
    often, stream, each = engine_of(tiny_recipe()), stream_of(tiny_recipe()), []
    for _ in range(3):
        often.step(stream, watchdog)
        each.append(often.means())
    assert engine.means().loss == pytest.approx(sum(means.loss for means in each) / 3, rel=1e-6)


def test_tree_sums_do_not_depend_on_the_number_of_ranks() -> None:
    vectors = [torch.randn(50, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 7) for i in range(16)]

    def cut(ranks: int) -> torch.Tensor:
        each = 16 // ranks
        return tree_sum(tree_sum(vectors[rank * each : (rank + 1) * each]) for rank in range(ranks))

    assert all(torch.equal(cut(1), cut(ranks)) for ranks in (2, 4, 8, 16))
    assert not torch.equal(cut(1), sum(vectors[1:], vectors[0])), "an ordinary sum is rounded differently"
