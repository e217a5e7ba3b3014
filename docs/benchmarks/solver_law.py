"""The distribution that a solver generates, without sampling: Gaussian data with the spectrum of CIFAR-10.

    python docs/benchmarks/solver_law.py                         a minute on a CPU

For Gaussian data the ideal predictor is linear, so the variance of each eigenvector's coordinate follows exactly from a
solver's table. Two numbers are printed: the relative error of the standard deviations (root mean square over the
coordinates whose standard deviation is above 0.01, so fine detail counts as much as brightness), and the Wasserstein-2
distance (dominated by brightness). VDM's prior is not exact, so its Wasserstein distance tends to 3.1, or 5.9 for the
flow.
"""

import math

import torch
from cifar10_images import cifar10
from torch import Tensor

from bsi.grids import GRIDS
from bsi.methods import BFN, BSI, VDM, Method
from bsi.solvers import SOLVERS, Solver

STEPS = (4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 1024)


def spectrum() -> Tensor:
    """Eigenvalues of the covariance of CIFAR-10's training images in [-1, 1]."""
    x = cifar10("train").flatten(1).float() / 127.5 - 1
    return torch.linalg.eigvalsh(torch.cov(x.T).double()).clamp(min=1e-6)


def variances(solver: Solver, method: Method, grid: Tensor, variance: Tensor) -> Tensor:
    """The variance of the samples' coordinates."""
    table, encoder = solver(method, grid), method.encoder(grid)
    signal, noise = encoder.signal[:, None], encoder.noise[:, None]
    spread = signal**2 * variance + noise**2
    gains = torch.where(spread > 0, signal * variance / torch.where(spread > 0, spread, 1.0), 0.0)
    start = float(method.prior(torch.ones(1, 1, dtype=torch.float64)))
    # second moments of the latent and of the prediction before
    ll, lp, pp = start**2 * torch.ones_like(variance), torch.zeros_like(variance), torch.zeros_like(variance)
    rows = torch.stack([table.latent, table.x_hat, table.previous, table.eps], dim=1).tolist()
    for (latent, x_hat, previous, eps), gain in zip(rows, gains, strict=False):
        a = latent + x_hat * gain
        ll, lp, pp = (
            a * a * ll + 2 * a * previous * lp + previous**2 * pp + eps**2,
            gain * (a * ll + previous * lp),
            gain**2 * ll,
        )
    last = 1 / signal[-1] if isinstance(method, VDM) else gains[-1]
    return last**2 * ll


def main() -> None:
    data = spectrum()
    detailed = data > 1e-4
    print(f"{len(data)} coordinates, standard deviations {data.max().sqrt():.3g} to {data.min().sqrt():.2g}\n")
    print(f"{'relative error / Wasserstein-2':<28}" + "".join(f"{k:>14}" for k in STEPS))
    for name, method in {"bsi": BSI(), "bfn": BFN(), "vdm": VDM()}.items():
        for grid_name, grid in GRIDS.items():
            if grid_name == "paper" and name != "bfn":
                continue  # it is the geometric one
            for solver_name, solver in SOLVERS.items():
                cells = []
                for k in STEPS:
                    found = variances(solver, method, grid(method, k), data)
                    relative = 0.5 * torch.log(found / data)[detailed].square().mean().sqrt()
                    distance = math.sqrt(float((found.sqrt() - data.sqrt()).square().sum()))
                    cells.append(f"{float(relative):.3f} / {distance:.2f}")
                print(f"{name} {grid_name:<10}{solver_name:<13}" + "".join(f"{cell:>14}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
