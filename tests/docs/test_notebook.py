"""The tour runs from top to bottom with correct numbers. Only its section on the package imports the package."""

import ast
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

TOUR = Path(__file__).parents[2] / "notebooks" / "tour.ipynb"
ALLOWED = {"math", "matplotlib", "numpy", "torch"}

pytest.importorskip("matplotlib", reason="the tour draws with matplotlib")


def sources() -> list[str]:
    cells = json.loads(TOUR.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def tour() -> Any:
    """The names that the notebook's cells define, all cells run in order; each figure is drawn to memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = 0

    def show() -> None:
        nonlocal figures
        plt.gcf().canvas.draw()
        plt.close("all")
        figures += 1

    threads, shown, style = torch.get_num_threads(), plt.show, dict(plt.rcParams)
    torch.set_num_threads(1)
    plt.show = show
    module = ModuleType("tour")
    sys.modules["tour"] = module
    try:
        with torch.random.fork_rng(), torch.enable_grad():
            for i, source in enumerate(sources()):
                exec(compile(source, f"tour.ipynb, code cell {i + 1}", "exec"), module.__dict__)
        module.__dict__["figures"] = figures
        yield module
    finally:
        plt.show = shown
        plt.rcParams.update(style)
        torch.set_num_threads(threads)
        del sys.modules["tour"]


def test_the_tour_needs_only_torch_numpy_and_matplotlib() -> None:
    notebook = json.loads(TOUR.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert TOUR.stat().st_size < 1_000_000
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    imported = set()
    *from_scratch, with_package = sources()
    for node in ast.walk(ast.parse("\n".join(from_scratch))):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported <= ALLOWED
    assert with_package.startswith("import bsi\n")


def test_the_tour_agrees_with_the_package(tour: Any) -> None:
    learned, error = float(tour.L_R["learned"] + tour.L_M["learned"]), 2 * tour.bound.monte_carlo_error * math.log(2)
    assert abs(2 * tour.bound.nats_per_dim - learned) < 4 * error + 0.03
    assert abs(float(tour.loss) - float(tour.L_M["learned"])) < 0.5
    assert torch.allclose(tour.drawn.std(0), tour.samples[256].std(0), rtol=0.1)


def test_every_picture_of_the_tour_is_drawn(tour: Any) -> None:
    assert tour.figures == sum(source.count("plt.show()") for source in sources()) == 8


def test_its_encoders_are_those_of_the_package(tour: Any) -> None:
    from bsi import BFN, BSI, VDM

    methods = {"BSI": BSI(tour.lambda_0, alpha_M=tour.alpha_M), "BFN": BFN(), "VDM": VDM()}
    for name, (encoder, low, high) in tour.METHODS.items():
        levels = tour.level(torch.linspace(0, 1, 7, dtype=torch.float64), low, high)
        ours = methods[name].encoder(levels)
        signal, noise = encoder(levels)
        torch.testing.assert_close(signal, ours.signal, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(noise, ours.noise, rtol=1e-9, atol=1e-12)


def test_its_ideal_predictor_is_the_oracle(tour: Any) -> None:
    from bsi import BSI
    from bsi.oracle import Mixture

    method = BSI(tour.lambda_0, alpha_M=tour.alpha_M)
    oracle = Mixture.isotropic(tour.m, float(tour.s))
    mu, lam = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), torch.logspace(-1, 2, 64)
    torch.testing.assert_close(tour.f_ideal(mu, lam), oracle.predictor(method)(mu, lam), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tour.log_density(mu), oracle.log_density(mu), rtol=1e-4, atol=1e-4)


def test_its_network_learns_and_the_finite_bound_falls_towards_its_limit(tour: Any) -> None:
    learned, ideal = (float(tour.L_R[name] + tour.L_M[name]) for name in ("learned", "ideal"))
    error = 0.03  # two standard errors of these Monte Carlo sums, as the notebook prints them
    assert abs(ideal - float(tour.entropy)) < error  # with the ideal predictor the bound is tight
    assert float(tour.entropy) - error < learned < ideal + 0.15

    for name in ("learned", "ideal"):
        gaps = tour.finite[name] - tour.L_M[name]
        assert (gaps > 0).all()
        assert (gaps.diff() < 0).all()


def test_its_samples_spread_as_the_data_does(tour: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        spread = tour.draw_data(20_000).std(0)
    few, many = tour.samples[4].std(0), tour.samples[256].std(0)
    assert (few < 0.9 * spread).any()  # four measurements are too few, as the figure shows
    error = float(spread.max()) / math.sqrt(2 * len(tour.samples[256]))
    assert ((many - spread).abs() < 5 * error).all()
