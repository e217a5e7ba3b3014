"""Studies run from end to end, share what they have in common, and go on where they were interrupted.

At a scale far below `smoke`: two training steps, a handful of samples. What is held is that everything is there and
finite, not what it says.
"""

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

import bsi.evaluation.samples
from bsi.backbones.config import DiTConfig, UNetConfig
from bsi.cli import main
from bsi.errors import DataError, Preempted, UsageError
from bsi.recipe import Every, Recipe
from bsi.studies import measure, runner
from bsi.studies.deadline import Deadline
from bsi.studies.job import Bound, Profile, Quality, Train, name_of
from bsi.studies.measure import Laboratory
from bsi.studies.networks import train_network
from bsi.studies.plan_text import plan_text
from bsi.studies.publish import page, publish
from bsi.studies.registry import STUDIES, named_studies
from bsi.studies.runner import plan, report_so_far, run
from bsi.studies.scale import Comparison, Drawn, Measured, Varied
from bsi.studies.scales import SMOKE
from bsi.studies.store import Result, Store
from bsi.studies.turns import in_turn
from bsi.training.lock import hold

VERDICTS = {"held", "not held", "undecided"}


def tiny(method) -> Recipe:
    recipe = SMOKE.comparisons[0].recipe(method)
    optimizer = replace(recipe.optimizer, warmup=0)
    backbone = DiTConfig(width=16, depth=1, heads=2, patch=4, dropout=0.0)
    return replace(recipe, backbone=backbone, steps=2, batch=16, optimizer=optimizer)


def tiny_unet(method) -> Recipe:
    return replace(tiny(method), backbone=UNetConfig(width=4, levels=1, dropout=0.0))


TINY = replace(
    SMOKE,
    comparisons=(Comparison(tiny, seeds=(0, 1)),),
    architecture=Comparison(tiny_unet, seeds=(0,)),
    convergence=Comparison(tiny, seeds=(0,)),
    profiled=tiny,
    parameter_recipe=tiny,
    drawn=Drawn(num=40, batch=40, steps=(2, 4), long=6, convergence=(2, 4, 16)),
    measured=Measured(levels=4, recon=2, finite_levels=4, ks=(2, 8), profile_levels=17, profile_images=8, batch=299),
    varied=Varied(
        lambda_0=(1e-2, 1.0),
        steps=(2, 4),
        gamma_0=(1e-2, math.inf),
        trained_k=(4,),
        evaluated_k=(2, 4),
        bias=(2.0,),
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All studies, run once."""
    out = tmp_path_factory.mktemp("studies")
    run(list(STUDIES.values()), TINY, out)
    return out


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_writes_its_figure_and_finite_numbers(folder, name):
    results = folder / f"{name}-smoke"
    with Image.open(results / "figure.png") as image:
        assert min(image.size) > 200
    assert "<svg" in (results / "figure.svg").read_text()[:1000]
    found = json.loads((results / "numbers.json").read_text())
    assert found["command"] == f"bsi study {name} --scale smoke --out FOLDER"
    assert found["commits"]
    assert found["commands"]
    assert found["seeds"] == {"comparison": 2, "illustration": 0, "noise-levels": 0}.get(name, 1)
    assert found["hardware"]
    assert {claim["verdict"] for claim in found["claims"]} <= VERDICTS
    rows = [row for table in found["tables"] for row in table["rows"]]
    assert rows
    numbers = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert numbers
    assert all(math.isfinite(value) for value in numbers)
    lines = list(csv.DictReader((results / "numbers.csv").read_text().splitlines()))
    assert [line["table"] for line in lines] == [t["name"] for t in found["tables"] for _ in t["rows"]]
    assert all(None not in line for line in lines)


def test_every_network_of_the_plan_is_kept_in_one_file(folder):
    store = Store(folder)
    planned = plan(list(STUDIES.values()), TINY, store)
    assert all(p.done for p in planned)
    trained = [p.job for p in planned if isinstance(p.job, Train)]
    assert len(trained) == len(list((folder / "networks").iterdir()))
    for job in trained:
        assert not (store.network(job.network) / "checkpoints").exists()
        assert store.weights(job.network).stat().st_size < 1 << 20
        assert store.weights(job.network).stat().st_mode & 0o777 == store.network(job.network).stat().st_mode & 0o666
    assert not list((folder / "measurements").glob("*samples*"))


def test_a_finished_study_does_nothing_again_but_draw(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("nothing is left to do")

    monkeypatch.setattr(runner, "train_network", refuse)
    monkeypatch.setattr(Laboratory, "measure", refuse)
    before = (folder / "comparison-smoke" / "figure.png").read_bytes()
    run([STUDIES["comparison"]], TINY, folder)
    assert (folder / "comparison-smoke" / "figure.png").read_bytes() == before


def test_networks_are_shared_between_studies(folder):
    names = {
        name: {p.job.network for p in plan([STUDIES[name]], TINY, Store(folder)) if isinstance(p.job, Train)}
        for name in STUDIES
    }
    assert names["fid-convergence"] <= names["comparison"]
    assert names["elbo-convergence"] | names["importance-sampling"] | names["samples"] <= names["comparison"]
    for other in ("disentangle", "initial-precision", "weighting", "finite-k"):
        assert len(names[other] & names["comparison"]) >= 1, other
    assert not names["illustration"]
    assert not names["noise-levels"]


def test_published_pages_are_made_of_what_was_written(folder, tmp_path):
    written = publish([folder / f"{name}-smoke" for name in ("comparison", "noise-levels")], tmp_path)
    assert written.read_text() == page(tmp_path / "results")
    text = written.read_text()
    assert "![comparison at the scale smoke](results/comparison-smoke.png)" in text
    assert (tmp_path / "results" / "comparison-smoke.png").stat().st_size < 150_000
    assert text.count("Not yet run") == 3 * (len(STUDIES) - 1) + 1 - 2  # the illustration is the same at every scale
    assert "3.448 ± 0.006" in text


def test_a_remark_stands_below_the_claims_and_stays(folder, tmp_path):
    publish([folder / "finite-k-smoke"], tmp_path)
    (tmp_path / "results" / "finite-k-smoke.txt").write_text("Not so with another seed.\n")
    text = publish([folder / "finite-k-smoke"], tmp_path).read_text()
    assert (
        text.index("Training on L_M^k") < text.index("*Remark.* Not so with another seed.\n") < text.index("| trained")
    )


def test_what_is_the_same_at_every_scale_is_published_once(tmp_path):
    written = run([STUDIES["illustration"]], replace(TINY, name="mini"), tmp_path / "out")
    publish(written, tmp_path / "docs")
    assert not list((tmp_path / "docs" / "results").iterdir())


def some_of(folder, out, keep) -> Store:
    """A store with the measurements that `keep` wants."""
    (out / "measurements").mkdir(parents=True)
    for path in (folder / "measurements").glob("*.json"):
        if keep(json.loads(path.read_text())["job"]):
            for each in (path, path.with_suffix(".npz")):
                shutil.copy(each, out / "measurements")
    return Store(out)


def test_an_unfinished_study_shows_what_there_is_and_concludes_nothing(folder, tmp_path):
    store = some_of(folder, tmp_path / "some", lambda job: job["recipe"]["seed"] == 0 and job["kind"] == "bound")
    before = store.results("comparison", "smoke")
    before.mkdir()
    for name in ("figure.png", "figure.svg"):  # of when fewer measurements were asked for
        (before / name).write_bytes(b"old")
    written = report_so_far([STUDIES["comparison"], STUDIES["samples"]], TINY, store.folder, "cpu")
    assert not list(before.glob("figure.*"))
    assert written == [store.results("comparison", "smoke")]  # of samples there is nothing
    found = json.loads((written[0] / "numbers.json").read_text())
    assert found["claims"] == []
    assert found["left"] == 3 * 2 * 4 + 3 - 3
    (table,) = found["tables"]
    networks = ["BSI, seed 0", "BFN, seed 0", "VDM, seed 0", "BSI, seed 1", "BFN, seed 1", "VDM, seed 1"]
    assert [row["network"] for row in table["rows"]] == networks
    whole = Store(folder).read(Bound(tiny("bsi"), 4, 2)).values
    assert table["rows"][0]["bits/dim"] == whole["bits_per_dim"]
    assert table["rows"][0]["bits/dim error"] == whole["monte_carlo_error"]
    assert [row["fd-digits at 4"] for row in table["rows"]] == ["missing"] * 6
    assert [row["fd-digits at 6"] for row in table["rows"]] == ["missing"] * 3 + [None] * 3  # of one seed alone
    text = publish(written, tmp_path / "docs").read_text()
    assert "Unfinished: 3 of 27 measurements are there, and nothing is concluded." in text
    assert "comparison-smoke.png" not in text


def test_a_finished_study_is_not_replaced_by_an_unfinished_one(folder, tmp_path):
    finished = publish([folder / "comparison-smoke"], tmp_path / "docs").read_text()
    store = some_of(folder, tmp_path / "some", lambda job: job["kind"] == "bound")
    written = report_so_far([STUDIES["comparison"]], TINY, store.folder, "cpu")
    assert publish(written, tmp_path / "docs").read_text() == finished


def test_what_more_seeds_found_is_not_replaced_by_fewer(folder, tmp_path, capsys):
    two = publish([folder / "comparison-smoke"], tmp_path / "docs").read_text()
    store = some_of(folder, tmp_path / "some", lambda job: True)
    written = run([STUDIES["comparison"]], TINY.with_seeds(1), store.folder)
    capsys.readouterr()
    figure = (tmp_path / "docs" / "results" / "comparison-smoke.png").read_bytes()
    assert publish(written, tmp_path / "docs").read_text() == two
    assert (tmp_path / "docs" / "results" / "comparison-smoke.png").read_bytes() == figure
    said = "comparison-smoke.json stays as it is: from 2 seeds, and this is from 1. Delete it to publish this"
    assert said in capsys.readouterr().err


def test_a_network_is_not_trained_again_when_all_of_it_is_measured(folder, tmp_path, monkeypatch):
    store = some_of(folder, tmp_path, lambda job: True)
    monkeypatch.setattr(runner, "train_network", lambda *_: pytest.fail("there is nothing left to measure of it"))
    run([STUDIES["finite-k"]], TINY, store.folder)
    (store.folder / "measurements" / f"{name_of(Bound(tiny('bsi'), 4, 2, 2))}.json").unlink()
    left = [p.job for p in plan([STUDIES["finite-k"]], TINY, store) if not p.done]
    assert left == [Train(tiny("bsi")), Bound(tiny("bsi"), 4, 2, 2)]


def test_more_seeds_add_to_those_that_are_there(folder, tmp_path):
    more, store = TINY.with_seeds(2), some_of(folder, tmp_path, lambda job: True)
    left = [p.job for p in plan([STUDIES["finite-k"]], more, store) if not p.done]
    assert {job.network.seed for job in left} == {1}
    (results,) = run([STUDIES["finite-k"]], more, store.folder)
    found = json.loads((results / "numbers.json").read_text())
    assert found["seeds"] == 2
    assert found["command"] == "bsi study finite-k --scale smoke --seeds 2 --out FOLDER"
    assert f"`{found['command']}`" in publish([results], tmp_path / "docs").read_text()


def test_networks_that_are_compared_with_none_of_ours_keep_their_one_seed(folder, tmp_path):
    """As those on CIFAR-10 at the paper's scale: claims are about the others, and say their seeds."""
    alone = Comparison(lambda method: replace(tiny(method), steps=3), seeds=(0,), methods=("bsi",), samples=False)
    scale, store = replace(TINY, comparisons=(*TINY.comparisons, alone)), some_of(folder, tmp_path, lambda job: True)
    assert scale.with_seeds(3).comparisons == (replace(TINY.comparisons[0], seeds=(0, 1, 2)), alone)
    (results,) = run([STUDIES["comparison"]], scale, store.folder)
    found = json.loads((results / "numbers.json").read_text())
    assert [row["seeds"] for row in found["tables"][1]["rows"] if row["bits/dim"] is not None] == [1]
    assert found["claims"]
    assert found["seeds"] == 2


@pytest.mark.parametrize("name", STUDIES)
def test_what_is_compared_between_networks_can_have_more_seeds(name):
    """In the other studies each network is looked at by itself, or shown, or the curve of one is the figure."""
    seeds = {job.network.seed for job in STUDIES[name].measures(TINY.with_seeds(3))}
    compared = {"comparison", "architecture", "disentangle", "initial-precision", "finite-k", "weighting"}
    assert seeds == ({0, 1, 2} if name in compared else {0} if seeds else set())
    asked = " --seeds 3" if name in compared else ""
    assert STUDIES[name].command(TINY.with_seeds(3)) == f"bsi study {name} --scale smoke{asked} --out FOLDER"


def test_the_plan_shows_what_was_measured(folder, tmp_path):
    store = some_of(folder, tmp_path, lambda job: job["kind"] == "bound")
    text = plan_text(plan([STUDIES["comparison"]], TINY, store), TINY, store)
    value = Store(folder).read(Bound(tiny("bsi"), 4, 2)).values["bits_per_dim"]
    (shown,) = [line for line in text.splitlines() if "bits/dim of BSI, seed 0" in line]
    assert shown.split()[0] == "done"
    assert float(shown.split(" = ")[1].split()[0]) == pytest.approx(value, rel=1e-2)
    assert text.splitlines()[-1].startswith(f"{6 + 21} of 33 jobs left")


def test_the_first_samples_are_kept_for_pictures(folder):
    images = Store(folder).read(Quality(tiny("vdm"), "fd-digits", 40, 4)).arrays["images"]
    assert images.shape == (40, 1, 8, 8)
    assert images.dtype == np.uint8
    assert images.max() <= 16


class Passing(Deadline):
    """A deadline that passes after so many looks at the clock."""

    def __init__(self, looks: int) -> None:
        object.__setattr__(self, "at", looks)

    @property
    def left_s(self) -> float:
        object.__setattr__(self, "at", self.at - 1)
        return self.at


def weights(store: Store, recipe: Recipe) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(store.weights(recipe))


def test_training_that_runs_out_of_time_goes_on_to_the_same_network(tmp_path):
    recipe = replace(tiny("bsi"), steps=6, every=Every(journal=1, checkpoint=100))
    whole, parts = Store(tmp_path / "whole"), Store(tmp_path / "parts")
    train_network(Train(recipe), TINY, whole, Deadline(), "cpu")
    with pytest.raises(Preempted, match="step 3 of 6"):
        train_network(Train(recipe), TINY, parts, Passing(3), "cpu")
    assert not parts.done(Train(recipe))
    train_network(Train(recipe), TINY, parts, Deadline(), "cpu")
    ours, theirs = weights(parts, recipe), weights(whole, recipe)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_drawing_that_runs_out_of_time_goes_on_to_the_same_samples(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(bsi.evaluation.samples, "PART", 16)
    store = Store(folder)
    job = Quality(tiny("bsi"), "fd-digits", 40, 4)
    bench = runner._Bench(TINY, store, Deadline(), "cpu")
    laboratory = replace(bench._laboratory("digits"), folder=tmp_path)
    model = bench._model(job, laboratory)
    with pytest.raises(Preempted, match="32 of 40 samples are drawn"):
        laboratory.measure(job, model, Passing(3))
    with monkeypatch.context() as elsewhere:  # where networks compute in another type
        elsewhere.setattr(measure, "inner_precision", lambda model: "bfloat16")
        with pytest.raises(UsageError, match="precision"):
            laboratory.measure(job, model, Deadline())
    seen, draw = [], measure._draw
    monkeypatch.setattr(
        "bsi.studies.measure._draw", lambda model, ids, how: seen.append(len(ids)) or draw(model, ids, how)
    )
    found = laboratory.measure(job, model, Deadline())
    assert seen == [8]
    assert np.array_equal(found.arrays["images"], store.read(job).arrays["images"])
    assert found.values["distance"] == pytest.approx(store.read(job).values["distance"], rel=1e-4)


def test_a_study_names_the_commit_that_it_began_with(tmp_path, monkeypatch):
    commits = iter(["first", "later"])
    monkeypatch.setattr(runner, "commit", lambda: next(commits))
    bench = runner._Bench(TINY, Store(tmp_path), Deadline(), "cpu")
    assert [bench.about()["commit"] for _ in range(2)] == ["first", "first"]


# A study whose networks are kept only once somebody writes a line to it: the run folder's lock is gone by then.
STUDY = """
import sys
from pathlib import Path
from bsi.studies import networks
from bsi.studies.registry import STUDIES
from bsi.studies.runner import run
from test_studies import TINY

def slowly(run, path, export=networks.export):
    print("trained", flush=True)
    sys.stdin.readline()
    return export(run, path)

networks.export = slowly
run([STUDIES["samples"]], TINY, Path(sys.argv[1]), device="cpu")
"""


def begin(out: Path, stdin: int) -> subprocess.Popen[str]:
    """The study in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    words, pipe = [sys.executable, "-c", STUDY, str(out)], subprocess.PIPE
    return subprocess.Popen(words, stdin=stdin, stdout=pipe, stderr=pipe, text=True, env=env)


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_that_another_process_does_is_waited_for_and_taken_over_if_that_one_dies(tmp_path, killed):
    with begin(tmp_path, subprocess.PIPE) as first:
        assert first.stdout.readline() == "trained\n"
        with begin(tmp_path, subprocess.DEVNULL) as second:
            said = next((line for line in second.stderr if "waiting for" in line), "it did not wait")
            assert f"pid {first.pid}, which is at it" in said
            if killed:
                first.kill()
            first.communicate("go on\n" * 3)
            shown, said = second.communicate()
    assert (first.returncode, second.returncode) == (-signal.SIGKILL if killed else 0, 0), said
    assert ("train BSI, seed 0: 2 steps of 16: done by another process" in shown) == (not killed)
    assert (f"pid {first.pid}: its process ended" in said) == killed
    assert all(planned.done for planned in plan([STUDIES["samples"]], TINY, Store(tmp_path)))
    assert [path.name for path in tmp_path.glob(".*")] == [], "locks are gone"


def test_a_study_that_waits_leaves_in_time(tmp_path):
    job, store = Train(tiny("bsi")), Store(tmp_path)
    with (
        hold(tmp_path, print, f".{name_of(job)}.lock"),
        pytest.raises(Preempted, match=rf"out of time: host .*, pid {os.getpid()} is still at train BSI"),
    ):
        in_turn(job, store, Deadline(0.0), lambda job: pytest.fail("it was done twice"))


def test_studies_on_two_nodes_of_one_batch_job_wait_for_each_other_too(tmp_path, monkeypatch):
    """A run folder's lock is taken over by the same job, which has been requeued; of studies a job may run many."""
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr("socket.gethostname", lambda: "node1")
    job, store = Train(tiny("bsi")), Store(tmp_path)

    def meanwhile(job):
        monkeypatch.setattr("socket.gethostname", lambda: "node2")
        with pytest.raises(Preempted, match=r"host node1, .* is still at train BSI"):
            in_turn(job, store, Deadline(0.0), lambda job: pytest.fail("it was done twice"))
        return "done"

    assert in_turn(job, store, Deadline(), meanwhile) == "done"


def test_a_study_out_of_time_says_what_is_left_writes_what_there_is_and_leaves_with_75(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(runner.__dict__, "Deadline", type("Over", (), {"after": staticmethod(lambda m: Deadline(0.0))}))
    with pytest.raises(Preempted, match="left, next train BSI, seed 0") as caught:
        run([STUDIES["comparison"]], TINY, tmp_path / "none", minutes=1.0)
    assert caught.value.code == 75
    assert not (tmp_path / "none").exists()
    store = some_of(folder, tmp_path / "some", lambda job: job["kind"] == "bound")
    with pytest.raises(Preempted):
        run([STUDIES["comparison"]], TINY, store.folder, minutes=1.0)
    found = json.loads((store.results("comparison", "smoke") / "numbers.json").read_text())
    assert found["left"] == 21


def test_a_damaged_measurement_is_named(tmp_path):
    store, job = Store(tmp_path), Bound(tiny("bsi"), 4, 2)
    path = store.record(job)
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(DataError, match=f"{name_of(job)}.json or its .npz is missing or damaged"):
        store.read(job)
    store.write(job, Result({"bits_per_dim": 1.0}, {"prior": np.zeros(1000)}), {})
    arrays = path.with_suffix(".npz")
    arrays.write_bytes(arrays.read_bytes()[:100])
    with pytest.raises(DataError, match="missing or damaged"):
        store.read(job)
    arrays.unlink()
    with pytest.raises(DataError, match="missing or damaged"):
        store.read(job)


def test_a_profile_has_the_errors_of_the_bound(folder):
    """The bound is the integral of the profile: both of the same network, up to having seen eight of the images."""
    store = Store(folder)
    found = store.read(Profile(tiny("bsi"), 17, 8)).arrays
    assert found["error"].shape == found["distance"].shape == (17, 8)
    u, g = np.log(found["level"])[:, None], 0.5 * found["level"][:, None] * found["error"]
    each = (0.5 * np.diff(u, axis=0) * (g[1:] + g[:-1])).sum(0) / (64 * math.log(2))
    bound = store.read(Bound(tiny("bsi"), 4, 2)).values
    assert abs(each.mean() - bound["measurement"]) < 4 * each.std(ddof=1) / math.sqrt(len(each))


def test_figures_without_matplotlib_say_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        run([STUDIES["illustration"]], TINY, folder)


def test_the_command_line_plans_runs_and_refuses(tmp_path, capsys, monkeypatch):
    assert main(["study", "comparison", "--plan", "--out", str(tmp_path)]) == 0
    assert "train BSI, seed 0: 750 steps of 64" in capsys.readouterr().out
    assert main(["study", "illustration", "--out", str(tmp_path), "--publish", str(tmp_path / "docs")]) == 0
    assert (tmp_path / "docs" / "results" / "illustration-smoke.png").is_file()
    assert main(["study", "comparsion", "--out", str(tmp_path)]) == 2
    assert "Did you mean 'comparison'?" in capsys.readouterr().err
    assert main(["study", "all", "--minutes", "0"]) == 2
    assert main(["study", "all", "--seeds", "0"]) == 2
    assert "--seeds is a number of seeds, 1 or more: got 0" in capsys.readouterr().err
    assert main(["study", "fid-convergence", "--seeds", "3", "--plan"]) == 2
    assert "fid-convergence trains nothing from more seeds: leave --seeds out" in capsys.readouterr().err
    assert main(["study", "all", "--seeds", "3", "--plan", "--out", str(tmp_path)]) == 0
    assert "seed 2" in capsys.readouterr().out
    assert main(["study", "all", "--so-far", "--json", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["studies"] == [
        str(tmp_path / f"{name}-smoke") for name in ("illustration", "noise-levels")
    ]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["study", "illustration", "--out", str(tmp_path)]) == 2
    assert "in one process" in capsys.readouterr().err


@pytest.mark.parametrize("scale", ["smoke", "mini", "paper"])
def test_ranks_are_sent_to_the_plans_commands_where_it_shows_some(tmp_path, monkeypatch, capsys, scale):
    words = ["study", "architecture", "--scale", scale, "--out", str(tmp_path)]
    assert main([*words, "--plan"]) == 0
    shown = "-m bsi train" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 2
    assert ("the commands that --plan shows" in capsys.readouterr().err) == shown


def test_all_is_every_study():
    assert [study.name for study in named_studies("all")] == list(STUDIES)


@pytest.mark.slow
def test_all_studies_run_at_the_scale_smoke(tmp_path):
    assert main(["study", "all", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    for name in STUDIES:
        found = json.loads((tmp_path / f"{name}-smoke" / "numbers.json").read_text())
        assert found["tables"]
