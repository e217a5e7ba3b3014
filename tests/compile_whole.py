"""Compiles what training, evaluation and sampling run, as one graph each, and compares value and gradient.

It is a separate program, since pytest's checks of annotations wrap every function in Python that torch.compile cannot
trace.
Prints one line for each function, method and backend that was compiled and agreed.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bsi.denoiser import Denoiser
from bsi.elbo import finite_measurement_loss, measurement_loss, reconstruction_loss
from bsi.grids import paper_grid
from bsi.levels import ExpectedError
from bsi.methods import BFN, BSI, VDM, Method
from bsi.model import Model
from bsi.objective import edm_weight, expected_levels, training_loss
from bsi.sampling import advance
from bsi.solvers import sde2
from bsi.values import CONTINUOUS, Bins


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * t[:, None]


def functions(method: Method) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Functions of (x, t, eps) that must compile to one graph."""
    denoiser, grid, bins = Denoiser(Net(), method), paper_grid(method, 4), Bins(-1.0, 1.0, 17)
    proposal = ExpectedError(method.levels.low, method.levels.high, offset=0.1)
    weight = edm_weight(method)
    drawn = expected_levels(method, weight)
    model = Model(Net(), method, shape=(6,), data=bins)
    table = sde2(method, grid)
    row = torch.stack([table.latent, table.x_hat, table.previous, table.eps], dim=1)[2].float()

    def step(x: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        x_hat = denoiser(x, grid[2].expand(len(x)))
        return advance(x, x_hat, 0.9 * x_hat, eps, row)

    return {
        "training_loss": lambda x, t, eps: training_loss(method, denoiser, x, t, eps),
        "weighted_training_loss": lambda x, t, eps: training_loss(method, denoiser, x, t, eps, weight, drawn),
        "measurement_loss": lambda x, t, eps: measurement_loss(method, denoiser, x, t, eps, proposal),
        "finite_measurement_loss": lambda x, t, eps: finite_measurement_loss(
            method, denoiser, x, grid, (t * 4).long(), eps
        ),
        "reconstruction_loss": lambda x, t, eps: reconstruction_loss(method, denoiser, x, eps, bins),
        "continuous_reconstruction_loss": lambda x, t, eps: reconstruction_loss(method, denoiser, x, eps, CONTINUOUS),
        "step": step,
        "model": lambda x, t, eps: model(x),
    }


def check(name: str, method: Method, backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(17, (5, 6), generator=generator)
    x, eps = Bins(-1.0, 1.0, 17).values(index), torch.randn(5, 6, generator=generator)
    t = torch.rand(5, generator=generator, dtype=torch.float64)
    plain = functions(method)[name]
    compiled = torch.compile(plain, fullgraph=True, backend=backend)

    def value(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        torch.manual_seed(1)  # the model draws its own noise
        return function(x, t, eps)

    if backend == "inductor":
        with torch.no_grad():  # it would take twice as long to compile the gradient too
            torch.testing.assert_close(value(compiled), value(plain), rtol=1e-4, atol=1e-4)
    else:
        x.requires_grad_()
        ours, expected = value(compiled), value(plain)
        gradients = (torch.autograd.grad(out.sum(), x)[0] for out in (ours, expected))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    print(f"{name} {type(method).__name__} {backend}", flush=True)


def main(backend: str) -> None:
    torch.manual_seed(0)
    if backend == "inductor":
        check("training_loss", BSI(), backend)
        return
    for method in (BSI(), BFN(), VDM()):
        for name in functions(method):
            check(name, method, backend)


if __name__ == "__main__":
    main(sys.argv[1])
