"""Studies run from end to end, share networks, resume, and are published. The numbers mean nothing at this scale."""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import bsi.evaluation.samples
from bsi.cli import main
from bsi.errors import DataError, Preempted, UsageError
from bsi.recipe import Every
from bsi.studies.measure import Bound, LevelErrors, Training, bound, paper_sampler, quality
from bsi.studies.outcome import STUDIES, Results
from bsi.studies.runner import do, load_network, named_studies, page, plan, plan_text, publish, run, train
from bsi.studies.scale import SCALES, Comparison
from bsi.training.lock import hold
from tiny_studies import TINY, tiny

DOCS, CPU = Path(__file__).parents[2] / "docs", torch.device("cpu")
SEEDED = {"comparison", "architecture", "disentangle", "initial-precision", "finite-k", "parametrization", "weighting"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All studies, run once."""
    out = tmp_path_factory.mktemp("studies")
    run(list(STUDIES.values()), Results(out, TINY), device="cpu")
    return out


def copy_of(folder, out) -> Results:
    """A store with the measurements, without the networks."""
    shutil.copytree(folder / "measurements", out / "measurements")
    return Results(out, TINY)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_figure_and_finite_numbers(folder, name):
    results = folder / f"{name}-smoke"
    with Image.open(results / "figure.png") as image:
        assert min(image.size) > 200
    found = json.loads((results / "numbers.json").read_text())
    assert found["command"] == f"bsi study {name} --scale smoke --out FOLDER"
    assert found["commits"]
    assert found["hardware"]
    assert found["seeds"] == {"comparison": 2, "illustration": 0, "noise-levels": 0}.get(name, 1)
    assert {claim["verdict"] for claim in found["claims"]} <= {"held", "not held", "undecided"}
    rows = [row for table in found["tables"] for row in table["rows"]]
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(value) for value in numbers)


def test_networks_are_shared_between_studies(folder):
    store, trained = Results(folder, TINY), {}
    for name, study in STUDIES.items():
        planned = plan([study], store)
        assert all(p.done for p in planned)
        trained[name] = {p.job.network for p in planned if isinstance(p.job, Training)}
    assert len(set.union(*trained.values())) == len(list((folder / "networks").iterdir()))
    assert not list(folder.glob("networks/*/checkpoints"))
    assert not list((folder / "measurements").glob("*samples*"))
    for name in ("fid-convergence", "elbo-convergence", "importance-sampling", "samples"):
        assert trained[name] <= trained["comparison"]
    for name in ("disentangle", "initial-precision", "weighting", "finite-k"):
        assert trained[name] & trained["comparison"]


def test_a_finished_study_needs_no_network_and_draws_the_same_figure(folder, tmp_path):
    store = copy_of(folder, tmp_path)
    with hold(tmp_path, print), pytest.raises(UsageError, match="pid"):  # one process works in a folder
        run([STUDIES["comparison"]], Results(tmp_path, TINY), device="cpu")
    run([STUDIES["comparison"]], Results(tmp_path, TINY), device="cpu")
    assert not (tmp_path / "networks").exists()
    before, after = (out / "comparison-smoke" / "figure.png" for out in (folder, store.folder))
    assert before.read_bytes() == after.read_bytes()


def test_more_seeds_reuse_existing_results(folder, tmp_path):
    store, missing = copy_of(folder, tmp_path), bound(TINY, tiny("bsi"), 2)
    store.file(missing).unlink()
    left = [p.job for p in plan([STUDIES["finite-k"]], store) if not p.done]
    assert left == [Training(tiny("bsi")), missing]
    left = [p.job for p in plan([STUDIES["weighting"]], replace(store, scale=TINY.with_seeds(2))) if not p.done]
    assert {job.network.seed for job in left} == {1}
    value = store.read(bound(TINY, tiny("bsi"))).values["bits_per_dim"]
    text = plan_text(plan([STUDIES["weighting"]], store), store)
    assert f"bits_per_dim {value:.5g}" in text
    assert text.splitlines()[-1].startswith("0 of ")


def test_more_seeds_are_for_networks_that_are_compared():
    scale = TINY.with_seeds(3)
    for name, study in STUDIES.items():
        seeds = {job.network.seed for job in study.measurements(scale)}
        assert seeds == ({0, 1, 2} if name in SEEDED else {0} if seeds else set())
        requested = " --seeds 3" if name in SEEDED else ""
        assert study.command(scale) == f"bsi study {name} --scale smoke{requested} --out FOLDER"
    alone = Comparison(tiny, seeds=(0,), methods=("bsi",), samples=False)  # compared with published values
    scale = replace(TINY, comparisons=(*TINY.comparisons, alone)).with_seeds(3)
    assert scale.comparisons == (replace(TINY.comparisons[0], seeds=(0, 1, 2)), alone)


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
def test_jobs_are_planned_once_seed_by_seed_and_networks_before_their_measurements(scale, tmp_path):
    planned = plan(named_studies("all", scale), Results(tmp_path, scale))
    assert len({p.job.name for p in planned}) == len(planned)
    trained = set()
    for p in planned:
        if isinstance(p.job, Training):
            trained.add(p.job.network)
        assert p.job.network in trained
    seeds = [p.job.network.seed for p in planned if p.study == "comparison"]
    assert seeds == sorted(seeds)


class Passing(Results):
    """A store whose time limit is reached after a number of checks."""

    @property
    def left_s(self) -> float:
        object.__setattr__(self, "deadline", self.deadline - 1)
        return self.deadline


def test_interrupted_training_resumes_to_the_same_network(tmp_path):
    recipe = replace(tiny("bsi"), steps=6, every=Every(journal=1, checkpoint=100))
    whole, parts = Results(tmp_path / "whole", TINY), Results(tmp_path / "parts", TINY)
    train(recipe, whole, CPU)
    with pytest.raises(Preempted, match="step 3 of 6"):
        train(recipe, Passing(tmp_path / "parts", TINY, 3.0), CPU)
    assert not parts.done(Training(recipe))
    train(recipe, parts, CPU)
    ours, theirs = (safetensors.torch.load_file(store.file(Training(recipe))) for store in (parts, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_interrupted_sampling_resumes_to_the_same_samples(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bsi.evaluation.samples, "PART", 16)
    store, job = Results(folder, TINY), quality(TINY, tiny("bsi"), paper_sampler(4))
    model = load_network(store.file(Training(job.network)), job.network, CPU)
    with pytest.raises(Preempted, match="32 of 40 samples"):
        job.measure(model, Passing(tmp_path, TINY, 3.0))
    found = job.measure(model, Results(tmp_path, TINY))
    assert np.array_equal(found.arrays["images"], store.read(job).arrays["images"])
    assert found.arrays["images"].shape == (40, 1, 8, 8)
    assert found.values["distance_test"] == pytest.approx(store.read(job).values["distance_test"], rel=1e-4)


def test_a_job_starts_only_if_enough_time_is_left(tmp_path):
    slow = replace(TINY, throughput=TINY.throughput._replace(startup_s=1e4))
    training = Training(tiny("bsi"))
    with pytest.raises(Preempted, match="next is bound") as caught:
        do(Bound(tiny("bsi"), 4, 2), Passing(tmp_path, slow, 100.0), CPU)
    assert caught.value.code == 75
    with pytest.raises(Preempted, match="next is training"):
        do(training, Passing(tmp_path, slow, 30.0), CPU)
    do(training, Passing(tmp_path, slow, 100.0), CPU)
    assert Results(tmp_path, slow).done(training)


def test_damaged_measurements_and_those_of_other_networks_are_rejected(folder, tmp_path):
    store, job = copy_of(folder, tmp_path), bound(TINY, tiny("bsi"))
    path, arrays = store.file(job), store.file(job).with_suffix(".npz")
    record = json.loads(path.read_text())
    record["job"]["recipe"]["optimizer"]["beta_2"] = 0.5  # as if a default had changed
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match="other defaults"):
        store.read(job)
    arrays.write_bytes(arrays.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        store.read(job)
    path.write_text("{")
    with pytest.raises(DataError, match="damaged"):
        store.read(job)


def test_the_bound_is_the_integral_of_the_errors_over_the_levels(folder):
    """Both are of one network; the errors are of eight images."""
    store = Results(folder, TINY)
    found = store.read(LevelErrors(tiny("bsi"), 17, 8)).arrays
    u, g = np.log(found["level"]), 0.5 * found["level"][:, None] * found["error"]
    each = np.trapezoid(g, u, axis=0) / (64 * math.log(2))
    measured = store.read(bound(TINY, tiny("bsi"))).values["measurement"]
    assert abs(each.mean() - measured) < 4 * each.std(ddof=1) / math.sqrt(len(each))


def test_a_missing_matplotlib_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install"):
        run([STUDIES["illustration"]], Results(folder, TINY), device="cpu")


def test_published_pages_omit_the_scale_smoke(folder, tmp_path):
    outcome = json.loads((folder / "finite-k-smoke" / "numbers.json").read_text())
    mini = tmp_path / "finite-k-mini"
    shutil.copytree(folder / "finite-k-smoke", mini)
    (mini / "numbers.json").write_text(json.dumps({**outcome, "scale": "mini"}))
    publish([mini, folder / "comparison-smoke"], tmp_path)
    assert not list((tmp_path / "results").glob("*smoke*"))
    (tmp_path / "results" / "finite-k-mini.txt").write_text("Another seed differs.\n")
    text = publish([mini], tmp_path).read_text()
    assert text == page(tmp_path / "results")
    assert text.index("Training on L_M^k") < text.index("*Remark.* Another seed differs.") < text.index("| trained")
    assert "medium: comparison, architecture;" in text


def test_the_published_results_reproduce_the_page():
    assert (DOCS / "results.md").read_text("utf-8") == page(DOCS / "results")
    for path in (DOCS / "results").iterdir():
        most = 500_000 if path.name.startswith("samples-") else 150_000  # photographs hardly compress
        assert path.stat().st_size < most, path
        if path.suffix == ".json":
            found = json.loads(path.read_text())
            assert "command" not in found["about"]
            assert (found["study"] in STUDIES, found["scale"] in SCALES) == (True, True)


def test_the_command_line_lists_plans_runs_and_rejects(tmp_path, capsys, monkeypatch):
    assert main(["study"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(STUDIES)
    assert main(["study", "comparison", "--plan", "--out", str(tmp_path)]) == 0
    assert "training of BSI, seed 0: 300 steps of 64" in capsys.readouterr().out
    assert main(["study", "illustration", "--out", str(tmp_path), "--json", "--publish", str(tmp_path / "docs")]) == 0
    assert json.loads(capsys.readouterr().out)["studies"] == [str(tmp_path / "illustration-smoke")]
    assert main(["study", "comparsion", "--out", str(tmp_path)]) == 2
    assert "'comparison'" in capsys.readouterr().err
    for bad in (["all", "--minutes", "0"], ["all", "--seeds", "0"], ["fid-convergence", "--seeds", "3", "--plan"]):
        assert main(["study", *bad]) == 2
        assert "--" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["study", "illustration", "--out", str(tmp_path)]) == 2
    assert "one process" in capsys.readouterr().err


@pytest.mark.slow
def test_all_studies_run_at_the_scale_smoke(tmp_path):
    """Trained networks: bounds far below a uniform guess (4.09 bits/dim), and finite distances."""
    assert main(["study", "all", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    found = {name: json.loads((tmp_path / f"{name}-smoke" / "numbers.json").read_text()) for name in STUDIES}
    for row in found["comparison"]["tables"][0]["rows"]:
        assert row["bits/dim"] < 3.5
    verdicts = [claim["verdict"] for claim in found["importance-sampling"]["claims"]]
    assert verdicts == ["held"] * 3
    assert found["elbo-convergence"]["claims"][0]["verdict"] == "held"
