"""`bsi eval`: from a run folder to a stored record that names everything its numbers depend on."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bsi
from bsi.backbones import build
from bsi.backbones.config import MLPConfig
from bsi.bound import estimate
from bsi.cli import main
from bsi.data.store import open_dataset
from bsi.elbo import Estimator
from bsi.errors import DataError, UsageError
from bsi.evaluation.runs import bound_record, evaluated, open_run, open_split, weights_hash
from bsi.evaluation.samples import check_images, drawn_images, measure_quality, quality_record
from bsi.metrics import QualityWarning
from bsi.recipe import Every
from bsi.runtime.distributed import Place, World
from bsi.sampler import Sampler

ALONE = World(Place(), torch.device("cpu"))


def trained(out: Path, seed: int) -> Path:
    every = Every(journal=2, evaluate=0, sample=0, checkpoint=2)
    recipe = replace(bsi.recipes.digits(), backbone=MLPConfig(16, 1), steps=2, batch=32, seed=seed, every=every)
    return bsi.train(recipe, out=out, device="cpu").path


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Path]:
    return [trained(tmp_path_factory.mktemp("runs") / name, seed) for seed, name in enumerate(("a", "b"))]


def answer(capsys, *words: object) -> dict:
    assert main(["eval", *map(str, words), "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_hash_of_weights_depends_on_names_types_shapes_and_values():
    def holding(**tensors: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()  # a ParameterDict would sort the names
        for name, tensor in tensors.items():
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        return module

    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    variants = [
        holding(a=zeros, b=ones),
        holding(a=ones, b=zeros),
        holding(a=zeros, c=ones),
        holding(a=zeros.view(3, 2), b=ones),
        holding(a=zeros.view(torch.int32), b=ones),
    ]
    assert len({weights_hash(each) for each in variants}) == len(variants)
    assert weights_hash(holding(b=ones, a=zeros)) == weights_hash(variants[0])


def test_the_papers_protocol_is_the_default_and_recorded(runs, capsys, tmp_path):
    record = answer(capsys, runs[0], "--bpd", "--limit", 24, "--per-sample", tmp_path / "each.npz")
    assert (record["measure"], record["recon"], record["proposal"], record["finite_k"]) == (5, 2, "loguniform", None)
    assert record["evaluations"] == 24 * 7
    assert record["images"] == 24
    assert record["monte_carlo_error"] > 0
    assert record["data_error"] >= 0
    assert record["bits_per_dim"] == pytest.approx(
        record["measurement"] + record["reconstruction"] + record["prior"], abs=1e-12
    )
    assert record["change_of_units"] == 0.0, "of data in bins"
    digits = bsi.load(runs[0])
    assert record["weights_sha256"] == weights_hash(digits.denoiser.backbone)
    assert (record["dataset"], record["split"], record["step"], record["seed"]) == ("digits", "test", 2, 0)
    assert len(record["dataset_version"]) == 64
    stored = [json.loads(path.read_text()) for path in (runs[0] / "evaluations").glob("*-bpd-test-*.json")]
    assert record in stored
    with np.load(tmp_path / "each.npz") as each:
        assert each["nats"].mean() / (64 * np.log(2)) == pytest.approx(record["bits_per_dim"])
        assert set(each.files) == {"nats", "measurement", "reconstruction", "prior", "variance"}


def test_the_bound_with_fitted_proposal_finite_steps_and_a_target_error(runs, capsys):
    infinite = answer(capsys, runs[0], "--bpd", "--limit", 24, "--proposal", "fitted")
    finite = answer(capsys, runs[0], "--bpd", "--limit", 24, "--proposal", "fitted", "--finite-k", 16)
    assert infinite["control"]
    assert infinite["pilot_evaluations"] >= 256
    errors = infinite["monte_carlo_error"] + finite["monte_carlo_error"]
    assert finite["bits_per_dim"] > infinite["bits_per_dim"] + 4 * errors
    target = infinite["monte_carlo_error"] / 1.3
    sharper = answer(capsys, runs[0], "--bpd", "--limit", 24, "--proposal", "fitted", "--target-se", target)
    assert sharper["monte_carlo_error"] <= target
    assert sharper["rounds"] > 1


def test_a_pair_of_runs_is_compared_with_common_noise(runs, capsys):
    record = answer(capsys, *runs, "--paired", "--limit", 24)
    alone = [answer(capsys, run, "--bpd", "--limit", 24)["bits_per_dim"] for run in runs]
    assert record["difference"] == pytest.approx(alone[0] - alone[1], abs=1e-9)
    assert record["monte_carlo_error"] < record["unpaired_error"]
    assert (record["a"]["run"], record["b"]["run"]) == ("a", "b")
    assert (record["images"], record["evaluations"], record["seed"], record["rounds"]) == (24, 2 * 24 * 7, 0, 1)
    assert (record["measure"], record["recon"], record["proposal"], record["finite_k"]) == (5, 2, "loguniform", None)
    assert list((runs[0] / "evaluations").glob("*-paired-test-*.json"))
    fitted = answer(capsys, *runs, "--paired", "--limit", 24, "--proposal", "fitted")
    error = 4 * (fitted["monte_carlo_error"] + record["monte_carlo_error"])
    assert fitted["pilot_evaluations"] == fitted["evaluations"] - record["evaluations"]
    assert fitted["difference"] == pytest.approx(record["difference"], abs=error)


def test_a_bound_is_printed_with_both_errors_and_baselines_of_the_same_images(runs, capsys):
    assert main(["eval", str(runs[0]), "--bpd", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"\d\.\d+ bits/dim ± \d\.\d+ \(Monte Carlo\) ± (at most )?\d\.\d+ \(data set of 299\)\n", printed)
    assert "299 test samples of digits" in printed
    assert "for comparison: histogram 2.44, PNG 4.03, WebP 3.08 bits/dim" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "--bpd, --fid"),
        (["RUN", "RUN", "--bpd"], "one run"),
        (["RUN", "--paired"], "two"),
        (["RUN", "RUN", "--paired", "--target-se", "0.1"], "--target-se"),
        (["RUN", "--bpd", "--measure", "1"], "at least 2"),
        (["RUN", "--bpd", "--limit", "0"], "--limit"),
        (["RUN", "--bpd", "--target-se", "0"], "--target-se must be positive"),
        (["RUN", "--fid", "--solver", "odr2"], "odr2"),
        (["nowhere", "--bpd"], "nowhere"),
        (["RUN", "--bpd", "--per-sample", "no/such/folder/x.npz"], "no folder"),
        (["RUN", "RUN", "--paired", "--per-sample", "x.npz"], "--per-sample"),
        (["RUN", "--bpd", "--kid"], "--fid"),
        (["RUN", "--bpd", "--precision-recall"], "--fid"),
        (["RUN", "--bpd", "--num", "8"], "--num applies only with --fid"),
        (["RUN", "--bpd", "--steps", "8"], "--steps applies only with --fid"),
        (["RUN", "--fid", "--measure", "8"], "--measure applies only with --bpd"),
    ],
)
def test_invalid_evaluations_have_exit_code_2(runs, capsys, words, message):
    assert main(["eval", *[str(runs[0]) if word == "RUN" else word for word in words]]) == 2
    assert message in capsys.readouterr().err


def test_a_result_that_cannot_be_stored_is_printed_with_exit_code_0(runs, capsys, tmp_path):
    """Row 33."""
    copy = shutil.copytree(runs[0], tmp_path / "copy")
    shutil.rmtree(copy / "evaluations", ignore_errors=True)
    (copy / "evaluations").write_text("a file where a folder is needed")
    words = ["eval", str(copy), "--bpd", "--limit", "8", "--device", "cpu", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["images"] == 8
    (warning,) = [line for line in err.splitlines() if "warning" in line]
    assert warning.endswith(f"the result is printed and not stored: cannot write {copy}/evaluations: Not a directory.")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_bound_is_printed_when_a_later_evaluation_fails(runs, capsys, monkeypatch, flags):
    def offline(*arguments: object) -> None:
        raise DataError("no weights of the FID network")

    monkeypatch.setattr("bsi.cli.eval.quality", offline)
    assert main(["eval", str(runs[0]), "--bpd", "--fid", "--limit", "8", "--device", "cpu", *flags]) == 3
    out, err = capsys.readouterr()
    assert "bits_per_dim" in json.loads(out) if flags else "bits/dim" in out
    assert "no weights of the FID network" in err


def test_evaluating_on_other_data_needs_its_name(runs):
    run = open_run(runs[0], ALONE)
    other = replace(run, trained=replace(run.trained, data=replace(run.trained.data, version="0" * 64)))
    with pytest.raises(DataError, match="not the one"):
        open_split(other, "test")
    assert open_split(other, "test", "digits").name == "test"


def test_an_exported_file_is_evaluated_like_its_run(runs, capsys, tmp_path):
    from bsi.runtime.export import export

    file = export(runs[0], tmp_path / "a.safetensors")
    record = answer(capsys, file, "--bpd", "--limit", 8)
    assert record["bits_per_dim"] == answer(capsys, runs[0], "--bpd", "--limit", 8)["bits_per_dim"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors"]


def test_a_change_of_units_is_recorded_in_bits(runs):
    run = open_run(runs[0], ALONE)
    split = open_split(run, "test")
    found = estimate(evaluated(run, split, 4), Estimator())
    record = bound_record(run, split, replace(found, log_determinant=3 * math.log(2)))
    assert record["change_of_units"] == pytest.approx(3)
    terms = record["measurement"] + record["reconstruction"] + record["prior"] + record["change_of_units"]
    assert record["bits_per_dim"] == pytest.approx(terms)


def test_the_command_and_the_model_have_one_estimator(capsys):
    """Two estimators of one bound gave 1.7938 and 1.8107 for the bundled network."""
    test = torch.tensor(open_dataset("digits").test)
    record, bound = answer(capsys, "digits", "--bpd"), bsi.load("digits").bits_per_dim(test)
    assert record["bits_per_dim"] == pytest.approx(float(bound), abs=1e-4)
    assert record["monte_carlo_error"] == pytest.approx(bound.monte_carlo_error, abs=1e-4)
    assert record["data_error"] == pytest.approx(bound.data_error, abs=1e-4)


def test_a_bundled_network_is_evaluated_by_its_name(capsys):
    record = answer(capsys, "digits", "--bpd", "--limit", 16)
    assert (record["run"], record["dataset"], record["recipe"]) == ("digits", "digits", "digits")
    assert record["weights_sha256"] == weights_hash(bsi.load("digits").denoiser.backbone)
    assert not Path("evaluations").exists()  # an exported file has no run folder
    paired = answer(capsys, "digits", "digits", "--paired", "--limit", 16)
    assert paired["difference"] == 0


def test_a_distance_of_enlarged_images_gives_a_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))

    class Enlarged(Averages):
        resize = "nearest-299"

    run = open_run(Path("digits"), ALONE)
    with pytest.warns(QualityWarning, match="8 x 8 pixels are enlarged"):
        found = quality(run, Sampler(steps=2), 8, Enlarged())
    assert "--bpd" in found.cautions[-1]
    monkeypatch.setattr("bsi.evaluation.samples.SMALL", 8)
    quality(run, Sampler(steps=2), 8, Enlarged())  # of the smallest size, without a warning


def quality(run, sampler, num, extractor=None, **options):
    """The distance of samples to the test images."""
    return measure_quality(run.model, open_split(run, "test"), sampler, num, extractor or Averages(), ALONE, **options)


class Averages:
    """Four features: the mean of each quarter of an image."""

    name, hash, resize, precision, dim = "averages", "0" * 64, "none", "float32", 4
    device = torch.device("cpu")

    def __call__(self, images):
        return torch.nn.functional.avg_pool2d(images[:, :1].float(), 4).flatten(1)


def test_sample_quality_records_all_settings(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    run, how = open_run(runs[0], ALONE), Sampler(steps=3)
    found = quality(run, how, 20, seed=5, batch=8)
    record = quality_record(run, how, 5, None, found)
    assert (record["metric"], record["n"], record["reference_n"]) == ("fd-averages", 20, 299)
    assert (record["reference_split"], record["resize"], record["extractor_hash"]) == ("test", "none", "0" * 64)
    assert record["generation"] == {"solver": "ode2", "evaluations": 4, "seed": 5}
    assert record["weights_sha256"] == run.weights
    assert (record["precision"], record["extractor_precision"]) == (run.precision, "float32")
    other = quality_record(replace(run, precision="bfloat16"), how, 5, None, replace(found, precision="tf32"))
    assert (other["precision"], other["extractor_precision"]) == ("bfloat16", "tf32")
    assert quality(run, how, 20, seed=5, batch=20).value == pytest.approx(found.value, rel=1e-3)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_recorded_evaluations_include_guidance(guidance, tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    run = open_run(Path("digits"), ALONE)
    network = build("mlp-16x1", shape=(1, 8, 8), num_classes=10)
    labeled = bsi.Model(network, run.model.method, shape=(1, 8, 8), data=run.model.bins).eval()
    seen: list[int] = []
    network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    how = Sampler(steps=3, guidance=guidance)
    found = measure_quality(labeled, open_split(run, "test"), how, 20, Averages(), ALONE, label=range(10), batch=8)
    assert sum(seen) == 20 * found.generation.evaluations
    assert found.generation.evaluations == (4 if guidance == 1 else 8)


def test_several_guidance_strengths_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    monkeypatch.setattr("bsi.metrics.Inception", lambda weights, device: Averages())
    run = tmp_path / "run"
    short = "--data.labels --steps 2 --batch 8 --virtual-shards 1 --optimizer.warmup 1 --every.evaluate 0"
    assert main(["train", "digits", *short.split(), "--every.sample", "0", "--out", str(run)]) == 0
    capsys.readouterr()
    requested = ["eval", str(run), "--fid", "--labels", "--num", "30", "--steps", "2"]
    found = {}
    for guidance in (["1", "2"], ["2"]):
        assert main([*requested, "--guidance", *guidance, "--json"]) == 0
        found[len(guidance)] = json.loads(capsys.readouterr().out)
    assert [record["drawing"]["guidance"] for record in found[2]] == [1.0, 2.0]
    assert found[2][1]["value"] == found[1]["value"] != found[2][0]["value"], "the same as if evaluated alone"
    assert all(record["error"] > 0 for record in found[2])
    assert main([*requested, "--guidance", "1", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert (
        f"fd-averages {found[2][0]['value']:.3f} ± {found[2][0]['error']:.3f}: 30 samples of 10 classes in turn ("
        in first
    )
    assert "guidance" not in first
    assert "evaluations, guidance 2, seed 0" in second
    assert main([*requested[:3], *requested[4:]]) == 0
    assert ": 30 samples (" in capsys.readouterr().out, "without labels"


def test_ranks_draw_the_samples_of_one(runs):
    model, how = open_run(runs[0], ALONE).model, Sampler(steps=2)

    def images(rank: int, size: int) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat(list(drawn_images(model, how, 7, World(Place(rank, size), torch.device("cpu")), 4)))

    assert images(0, 1).shape == (7, 3, 8, 8)
    together = torch.empty(7, 3, 8, 8, dtype=torch.uint8)
    together[0::2], together[1::2] = images(0, 2), images(1, 2)
    assert (images(0, 1).int() - together.int()).abs().float().mean() < 0.1  # a pixel may round into the next bin


def test_too_few_images_are_rejected_or_give_a_warning(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path))
    run = open_run(runs[0], ALONE)
    split = open_split(run, "test")
    empty = replace(split, dataset=replace(split.dataset, test=split.dataset.test[:1]))
    with pytest.raises(DataError, match="has 1 in its test split"):
        measure_quality(run.model, empty, Sampler(steps=2), 8, Averages(), ALONE)
    with pytest.raises(DataError, match="at least 2"):
        quality(run, Sampler(steps=2), 1)
    with pytest.warns(QualityWarning, match="singular"):
        quality(run, Sampler(steps=2), 3)


def test_weights_of_another_shape_name_their_network(tmp_path):
    recipe = replace(bsi.recipes.digits(), backbone=MLPConfig(16, 1), steps=1)
    with pytest.raises(UsageError, match=r"those of another network, DiTConfig\(width=64"):
        bsi.train(recipe, out=tmp_path / "run", init_from="digits", device="cpu")


def test_a_distance_of_other_data_is_rejected_before_weights_are_downloaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bsi.metrics.Inception", lambda *args: pytest.fail("fetched"))
    recipe = replace(bsi.recipes.arrays(), backbone=MLPConfig(16, 1), steps=1, batch=64)
    run = bsi.train(recipe, data=torch.randn(64, 2), out=tmp_path / "run", device="cpu").path
    assert main(["eval", str(run), "--fid", "--device", "cpu"]) == 2
    assert "only binned images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "bins"), [((3,), bsi.Bins.uint8()), ((2, 8, 8), bsi.Bins.uint8()), ((1, 8, 8), None)]
)
def test_only_binned_images_have_features(shape, bins):
    model = bsi.Model(build("mlp-16x1", shape=shape), bsi.BSI(), shape=shape, data=bins)
    with pytest.raises(UsageError, match="only binned images with 1 or 3 channels have features"):
        check_images(model)
