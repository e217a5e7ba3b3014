"""Features of two real processes: the result of one rank, for any distribution of the samples.

Run by torchrun, this file is the ranks' program.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bsi.metrics import Features, Moments, frechet_distance, kernel_distance

DIM = 6


def vectors(n: int) -> torch.Tensor:
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)).exp() + 100


def summary(samples: Features) -> dict[str, object]:
    assert samples.vectors is not None
    real = vectors(64)
    return {
        "n": samples.n,
        "distance": frechet_distance(samples.moments, Moments.of(real)),
        "kid": kernel_distance(samples.vectors, real, block_size=8).value,
        "vectors": samples.vectors.tolist(),
    }


def features(x: torch.Tensor) -> Features:
    return Features(Moments.empty(DIM) + Moments.of(x), x)


def rank_main(out: Path) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    unequal = features(vectors(41)[rank::world]).over_ranks()
    lopsided = features(vectors(17) if rank == 0 else vectors(17)[:0]).over_ranks()
    (out / f"{rank}.json").write_text(json.dumps([summary(unequal), summary(lopsided)]))
    dist.destroy_process_group()


def test_two_ranks_with_unequal_counts_give_the_result_of_one(tmp_path: Path) -> None:
    import bsi

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(bsi.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, __file__, str(tmp_path)], check=True, timeout=120, env=environment)
    alone = [summary(features(vectors(n)).over_ranks()) for n in (41, 17)]
    for rank in (0, 1):
        together = json.loads((tmp_path / f"{rank}.json").read_text())
        for ours, one in zip(together, alone, strict=True):
            assert ours["n"] == one["n"]
            assert ours["vectors"] == one["vectors"]
            assert ours["kid"] == one["kid"]
            assert abs(ours["distance"] - one["distance"]) < 1e-9 * one["distance"]


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]))
