"""Muon: its matrices, its step, its gate, and what of it a checkpoint holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import bsi
from bsi.backbones import DiTConfig, MLPConfig, UNetConfig, build
from bsi.errors import UsageError
from bsi.methods import BSI
from bsi.recipe import Data, Every, Optimizer, Recipe
from bsi.training.optimizers import ADAMS_SIZE, Muon, Optimizers, polar

YES, NO, ONE = torch.tensor(True), torch.tensor(False), torch.ones(())


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(4, 24, 24), (2, 64, 16), (2, 16, 64)])
def test_polar_keeps_singular_vectors_with_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    x = _normal(*shape)
    found = polar(x)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ found @ vt.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert float((inner - torch.diag_embed(values)).abs().max()) < 1e-4
    # A square normal matrix has a singular value near 0, which stays small.
    assert float(values.max()) < 1.3
    assert float((values > 0.6).double().mean()) > 0.9
    assert torch.allclose(polar(x.mT), found.mT, atol=1e-5)
    assert torch.allclose(polar(7 * x), found, atol=1e-4)


def test_a_muon_step_has_the_size_of_adamws_for_any_gradient() -> None:
    for rows, columns in ((64, 16), (16, 64), (32, 32)):
        matrix = nn.Parameter(torch.zeros(rows, columns))
        matrix.grad = 1e-6 * _normal(rows, columns)
        Muon([matrix], beta=0.95, decay=0.0).step(torch.tensor(0.01), ONE, YES)
        size = float(matrix.detach().square().mean().sqrt())
        assert 0.7 * ADAMS_SIZE * 0.01 < size < 1.3 * ADAMS_SIZE * 0.01


def test_a_muon_step_is_the_published_one_with_nesterov_momentum() -> None:
    matrix, beta, decay, lr = nn.Parameter(_normal(8, 6)), 0.8, 0.1, 0.05
    muon, weights, momentum = Muon([matrix], beta, decay), matrix.detach().clone(), torch.zeros(8, 6)
    for seed, scale in ((1, 1.0), (2, 16.0), (3, 0.5)):  # with more and less clipping
        gradient = _normal(8, 6, seed=seed)
        matrix.grad = scale * gradient
        muon.step(torch.tensor(lr), torch.tensor(scale), YES)
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum + (1 - beta) * gradient
        weights = weights - lr * (ADAMS_SIZE * 8**0.5 * polar(ahead[None])[0] + decay * weights)
        assert torch.allclose(matrix.detach(), weights, atol=1e-6)


def test_muon_treats_convolutions_as_matrices_and_decays_weights() -> None:
    filters = nn.Parameter(_normal(8, 4, 3, 3).contiguous(memory_format=torch.channels_last))
    flat = nn.Parameter(filters.detach().reshape(8, 36).clone())
    gradient = _normal(8, 4, 3, 3, seed=1)
    filters.grad, flat.grad = gradient.clone(memory_format=torch.channels_last), gradient.reshape(8, 36).clone()
    for p in (filters, flat):
        Muon([p], beta=0.9, decay=0.5).step(torch.tensor(0.1), ONE, YES)
    assert torch.allclose(filters.detach().reshape(8, 36), flat.detach(), atol=1e-5)
    still = nn.Parameter(_normal(4, 4))
    before = still.detach().clone()
    still.grad = torch.zeros(4, 4)
    Muon([still], beta=0.9, decay=0.5).step(torch.tensor(0.1), ONE, YES)
    assert torch.allclose(still.detach(), 0.95 * before)


def test_muon_does_not_depend_on_the_memory_format() -> None:
    start, gradients = _normal(8, 4, 3, 5), [_normal(8, 4, 3, 5, seed=seed) for seed in (1, 2)]
    found = []
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2)):
        lying = (
            start.permute(order)
            .clone(memory_format=torch.contiguous_format)
            .permute([order.index(i) for i in range(4)])
        )
        filters = nn.Parameter(lying)
        assert filters.stride() == lying.stride()
        muon = Muon([filters], beta=0.9, decay=0.5)
        for gradient in gradients:
            filters.grad = gradient.clone()
            muon.step(torch.tensor(0.1), ONE, YES)
        found.append((filters.detach(), muon.momenta[0]))
    for weights, momentum in found[1:]:
        assert torch.allclose(weights, found[0][0], atol=1e-5)
        assert torch.allclose(momentum, found[0][1], atol=1e-6)


def test_a_noncontiguous_matrix_uses_adamw() -> None:
    layers = nn.Sequential(*(nn.Conv2d(4, 4, 3) for _ in range(4)))
    odd, settings = layers[1], Optimizer(lr=0.1, kind="muon")
    odd.weight = nn.Parameter(odd.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))
    assert {id(p) for p in Optimizers(layers, settings).muon.matrices} == {id(layers[2].weight)}


def test_a_skipped_step_changes_neither_weights_nor_momenta() -> None:
    matrix = nn.Parameter(_normal(8, 8))
    muon = Muon([matrix], beta=0.9, decay=0.1)
    matrix.grad = _normal(8, 8, seed=1)
    muon.step(torch.tensor(0.1), ONE, YES)
    before, momentum = matrix.detach().clone(), muon.momenta[0].clone()
    matrix.grad = torch.full((8, 8), float("nan"))
    muon.step(torch.tensor(0.1), ONE, NO)
    assert torch.equal(matrix.detach(), before)
    assert torch.equal(muon.momenta[0], momentum)


def test_muon_updates_hidden_matrices_and_adamw_the_rest() -> None:
    networks = {
        "dit": build(DiTConfig(width=16, depth=2, heads=2), (3, 8, 8), 256, num_classes=3),
        "mlp": build(MLPConfig(width=16, depth=2), (5,)),
        "unet": build(UNetConfig(width=32, levels=2), (3, 8, 8), 256),
    }
    for network in networks.values():
        both = Optimizers(network, Optimizer(lr=1e-3, kind="muon"))
        names = set(both.state())
        turned = {name.removeprefix("momentum/") for name in names if name.startswith("momentum/")}
        kept = {name.removeprefix("exp_avg/") for name in names if name.startswith("exp_avg/")}
        assert turned
        assert turned | kept == {name for name, _ in network.named_parameters()}
        assert not turned & kept
        parameters = dict(network.named_parameters())
        assert all(parameters[name].ndim >= 2 for name in turned)
        assert not any(name.startswith(("head", "embed", "condition", "modulation", "stem")) for name in turned)
    plain = Optimizers(networks["mlp"], Optimizer(lr=1e-3))
    assert not any(name.startswith("momentum/") for name in plain.state())


def _recipe(steps: int) -> Recipe:
    return Recipe(
        name="muon",
        method=BSI(alpha_M=1e3),
        backbone=MLPConfig(width=32, depth=2),
        data=Data("points"),
        steps=steps,
        batch=16,
        optimizer=Optimizer(lr=1e-2, kind="muon", warmup=2),
        virtual_shards=2,
        every=Every(journal=1, checkpoint=3),
        threads=1,
    )


def test_a_resumed_run_with_muon_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    data = _normal(64, 3)
    whole = bsi.train(_recipe(8), data=data, out=tmp_path / "whole").path
    bsi.train(_recipe(3), data=data, out=tmp_path / "parts")
    parts = bsi.train(_recipe(8), data=data, out=tmp_path / "parts").path
    a, b = bsi.load(whole).state_dict(), bsi.load(parts).state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_muon_updates_all_inner_layers_of_a_custom_network(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 3))

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    network = Own()
    state = Optimizers(network, Optimizer(lr=1e-3, kind="muon")).state()
    assert [name for name in state if name.startswith("momentum/")] == ["momentum/layers.2.weight"]
    before = network.layers[2].weight.detach().clone()
    bsi.train(_recipe(2), data=_normal(64, 3), backbone=network, out=tmp_path / "own")
    assert not torch.equal(network.layers[2].weight.detach(), before)


def test_a_momentum_of_one_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"optimizer\.momentum"):
        replace(_recipe(2).optimizer, momentum=1.0)
