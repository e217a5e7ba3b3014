"""`bsi sample`: what it writes, what a sample depends on, how it resumes, what it rejects."""

import errno
import json
import math
import os
import re
import subprocess
import sys
import wave
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bsi
from bsi.backbones import MLPConfig, build
from bsi.cli import main
from bsi.cli.eval import Eval
from bsi.cli.sample import Sample, summary, write_samples
from bsi.data import open_dataset
from bsi.errors import BsiError, DataError, NonFinite, UsageError
from bsi.evaluation.samples import PART, SampleFile
from bsi.grids import GRIDS
from bsi.pictures import grid
from bsi.recipe import Samples
from bsi.runtime.export import read_trained
from bsi.sampler import FLOW_SOLVER, Sampler, default_solver
from bsi.solvers import SOLVERS

SHAPE = (1, 4, 4)


def model(
    method: bsi.BSI | bsi.BFN | bsi.VDM | None = None, num_classes: int = 0, class_names: tuple[str, ...] = ()
) -> bsi.Model:
    torch.manual_seed(0)
    network = build(MLPConfig(16, 1), SHAPE, 17, num_classes)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # a layer of zeros would hide the layers before it
    return bsi.Model(network, method or bsi.BSI(), SHAPE, bsi.Bins(-1.0, 1.0, 17), class_names=class_names).eval()


def arguments(folder: Path, **changed: object) -> Sample:
    settings = {f.name: changed.pop(f.name) for f in fields(Sampler) if f.name in changed}
    args = Sample(folder, num=10, sampler=Sampler(**{"steps": 4, **settings}), npz=folder / "samples.npz")
    return replace(args, **changed)


def array(path: Path) -> np.ndarray:
    with np.load(path, allow_pickle=False) as arrays:
        return arrays["arr_0"]


def draw(network: bsi.Model, folder: Path, **changed: object) -> tuple[dict, np.ndarray]:
    """The record and the samples of a command that writes a new file."""
    args = arguments(folder, **{"npz": folder / f"{len(list(folder.iterdir()))}.npz", **changed})
    return write_samples(network, args), array(args.npz)


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("method", [bsi.BSI(), bsi.BFN(), bsi.VDM()], ids=repr)
def test_all_outputs_are_written_and_evaluations_counted(tmp_path, capsys, method, guidance):
    """k + 1 evaluations for BSI and BFN, k for VDM, and twice as many with guidance."""
    network, seen = model(method, num_classes=3), []
    network.denoiser.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    args = arguments(tmp_path, label="1", guidance=guidance, batch_size=4)
    record = write_samples(network, args)
    expected = (4 if isinstance(method, bsi.VDM) else 5) * (1 if guidance == 1 else 2)
    assert record["evaluations"] == expected
    assert sum(seen) == 10 * expected
    assert "sample 50/50 steps" in capsys.readouterr().err
    args = replace(args, out=tmp_path / "grid.png", animate=tmp_path / "belief.gif")
    record = write_samples(network, args)
    samples = array(args.npz)
    assert (samples.shape, samples.dtype) == ((10, *SHAPE), np.uint8)
    assert 3 < len(np.unique(samples)) <= 17
    assert record["files"] == [str(tmp_path / name) for name in ("grid.png", "samples.npz", "belief.gif")]
    assert json.loads(json.dumps(record)) == record
    with Image.open(args.animate) as animation, Image.open(args.out) as picture:
        assert animation.n_frames == 5
        assert picture.size == (4 * 98 + 2, 3 * 98 + 2)
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.parametrize("changed", [{}, {"solver": "sde2", "grid": "geometric", "steps": 6}], ids=str)
@pytest.mark.parametrize("method", [bsi.BSI(), bsi.VDM()], ids=repr)
def test_python_and_the_command_line_draw_the_same_samples(tmp_path, method, changed):
    record, samples = draw(model(method), tmp_path, seed=3, **{"steps": 15, **changed})
    assert record["solver"] == changed.get("solver", default_solver(method))
    np.testing.assert_array_equal(model(method).sample(10, seed=3, **changed).numpy(), samples)


def test_python_and_the_command_line_have_the_same_defaults(tmp_path):
    assert Sample(tmp_path).sampler == Samples().sampler == Sampler()
    evaluation = Eval((tmp_path,))
    assert (evaluation.steps, evaluation.solver, evaluation.grid) == (Sampler.steps, Sampler.solver, Sampler.grid)
    methods = (bsi.BSI(), bsi.BSI(gamma_0=math.inf), bsi.BFN(), bsi.VDM())
    assert [default_solver(method) for method in methods] == ["ode2", "sde2", "sde2", "sde2"]


@pytest.mark.parametrize("verb", ["sample", "eval"])
def test_the_help_names_every_solver_and_every_grid(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = " ".join(re.sub(r"[\W_]*[│|][\W_]*", " ", capsys.readouterr().out).split())
    for name in (*SOLVERS, *GRIDS):
        assert re.search(rf"(?<![\w-]){name}(?![\w-])", text), name


def test_samples_depend_on_seed_and_number_only(tmp_path):
    _, whole = draw(model(), tmp_path)
    for changed in ({"batch_size": 3}, {"num": 4}):
        _, found = draw(model(), tmp_path, **changed)
        # A network may round differently in another batch: at most a pixel in a hundred, by one bin.
        difference = np.abs(found.astype(int) - whole[: len(found)])
        assert difference.max() <= 1
        assert (difference > 0).mean() <= 0.01
    _, other = draw(model(), tmp_path, seed=1)
    assert (other != whole).mean() > 0.2


def test_an_interrupted_command_resumes_where_it_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bsi.evaluation.samples.PART", 8)
    whole = arguments(tmp_path, num=21, steps=1)
    write_samples(model(), whole)
    cut, write = replace(whole, npz=tmp_path / "cut.npz"), SampleFile.write

    def interrupted(self: SampleFile, ids: range, rows: np.ndarray) -> None:
        if ids.start == 8:
            raise KeyboardInterrupt
        write(self, ids, rows)

    with monkeypatch.context() as patch:
        patch.setattr(SampleFile, "write", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"8 of 21 samples are kept.*same command"):
            write_samples(model(), cut)
        assert main(["sample", "digits", "--num=9", "--steps=1", "--device=cpu", f"--npz={tmp_path / 'd.npz'}"]) == 130
        assert "8 of 9 samples are kept" in capsys.readouterr().err.splitlines()[-1]
    assert not cut.npz.exists()
    record = write_samples(model(), cut)
    assert ": 8 existed, 13 in " in summary(record)
    assert np.array_equal(array(cut.npz), array(whole.npz))
    assert summary(write_samples(model(), cut)).splitlines()[0].endswith(": all existed")


@pytest.mark.slow
def test_two_ranks_draw_the_samples_of_one(tmp_path):
    one, two = tmp_path / "one.npz", tmp_path / "two.npz"
    words = f"sample digits --num {PART + 7} --steps 1 --device cpu --json --animate {tmp_path / 'belief.gif'}"
    assert main([*words.split(), "--npz", str(one)]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    ranks = [*torchrun, "bsi", *words.split(), "--npz", str(two), "--out", str(tmp_path / "two.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(ranks, check=True, timeout=120, env=environment, capture_output=True, text=True)
    (record,) = map(json.loads, done.stdout.splitlines())  # of the first rank only
    assert record["drawn"] == PART + 7
    assert re.findall("sample 0/.*", done.stderr) == [f"sample 0/{2 * PART} steps"]  # one part, not both
    np.testing.assert_array_equal(array(two), array(one))
    assert (tmp_path / "two.png").exists()
    assert not list(tmp_path.glob("*.parts"))


def test_parts_of_other_settings_are_never_mixed(tmp_path, monkeypatch):
    about = {"seed": 0}
    parts = SampleFile(tmp_path / "a.npz", 3, about)
    assert parts.missing() == [range(3)]
    with pytest.raises(UsageError, match="seed 0 there, 1 here"):
        SampleFile(tmp_path / "a.npz", 3, {"seed": 1}).missing()
    parts.write(range(3), np.zeros((3, 2), np.uint8))
    assert SampleFile(tmp_path / "a.npz", 5, about).missing() == [range(5)]  # the last part of a smaller number
    assert parts.missing() == []
    parts.join()
    for wrong, message in ((SampleFile(tmp_path / "a.npz", 4, about), "another number"),
                           (SampleFile(tmp_path / "a.npz", 3, {"seed": 1}), "other samples")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            wrong.missing()
    np.savez(tmp_path / "b.npz", something=np.zeros(3))
    with pytest.raises(DataError, match="not written by bsi sample"):
        SampleFile(tmp_path / "b.npz", 3, about).missing()


def test_parts_of_other_weights_classes_or_precisions_are_never_mixed(tmp_path):
    write_samples(model(num_classes=3), arguments(tmp_path, label="1"))
    other, half = model(num_classes=3), model(num_classes=3)
    torch.nn.init.constant_(next(other.denoiser.backbone.parameters()), 0.5)
    half.denoiser.backbone.compute_dtype = torch.bfloat16  # stored as what `auto` selects
    for network, label, message in (
        (other, "1", r"weights '[0-9a-f]{64}' there, '[0-9a-f]{64}' here"),
        (half, "1", "precision 'float32' there, 'bfloat16' here"),
        (model(num_classes=3), "2", "label 1 there, 2 here"),
    ):
        with pytest.raises(UsageError, match=message):
            write_samples(network, arguments(tmp_path, label=label))


@pytest.mark.parametrize("left", [b"", b"\x93NUMPY", b"whole"])
def test_a_damaged_part_is_drawn_again(tmp_path, left):
    parts = SampleFile(tmp_path / "a.npz", 3, {"seed": 0})
    parts.missing()
    parts.write(range(3), np.zeros((3, 2)))
    (file,) = parts.folder.glob("*.npy")
    file.write_bytes(file.read_bytes()[:-8] if left == b"whole" else left)
    assert parts.missing() == [range(3)]
    (parts.folder / "about.json").write_text("{")
    with pytest.raises(DataError, match=r"about.json is damaged.*Remove .*a.npz.parts"):
        parts.missing()


def test_a_class_is_selected_by_its_name_or_number(tmp_path):
    named, found = model(num_classes=3, class_names=("cat", "dog", "0")), {}
    for label, number in {"dog": 1, "1": 1, "2": 2, "0": 2}.items():  # a name takes precedence over a number
        record, found[label] = draw(named, tmp_path, label=label)
        assert (record["label"], record["class"]) == (number, named.class_names[number])
        assert f"of class {record['class']}," in summary(record)
    assert np.array_equal(found["dog"], found["1"])
    assert np.array_equal(found["0"], found["2"])
    assert not np.array_equal(found["0"], found["1"])


def test_all_classes_are_drawn_with_one_column_each(tmp_path):
    network, out = model(num_classes=3), tmp_path / "all.png"
    found = [draw(network, tmp_path, label=label, num=7)[1] for label in ("0", "1", "2")]
    record, drawn = draw(network, tmp_path, out=out, npz=tmp_path / "all.npz", labels=True, num=7)
    assert (record["label"], record["classes"], record["class"]) == (None, 3, None)
    assert "7 samples of 3 classes in turn," in summary(record)
    assert np.array_equal(drawn, np.stack([found[i % 3][i] for i in range(7)]))
    with np.load(tmp_path / "all.npz") as arrays:
        assert arrays["labels"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    with Image.open(out) as sheet:
        assert np.array_equal(np.asarray(sheet.convert("RGB")), np.asarray(grid(drawn, 3, 0.0, 16.0).convert("RGB")))
    write_samples(model(num_classes=21), arguments(tmp_path, npz=None, out=out, labels=True, num=25))
    with Image.open(out) as sheet:  # more than twenty classes have no columns
        assert sheet.size == grid(np.zeros((25, *SHAPE), np.uint8), 5).size


def test_invalid_options_are_rejected_before_the_first_evaluation(tmp_path, monkeypatch):
    images, vectors = model(num_classes=3), bsi.Model(build(MLPConfig(16, 1), (5,)), bsi.BSI(), (5,))
    plain, named = model(), model(num_classes=3, class_names=("cat", "dog", "0"))
    write_samples(images, arguments(tmp_path, seed=7, npz=tmp_path / "others.npz"))
    for each in (images, vectors, plain, named):
        monkeypatch.setattr(each.denoiser, "forward", lambda *arguments: pytest.fail("evaluated"))
    for network, changed, message in (
        (images, {"solver": "sde22"}, "did you mean 'sde2'"),
        (images, {"grid": "papers"}, "did you mean 'paper'"),
        (images, {"label": "3"}, "labels are 0 to 2"),
        (images, {"label": "-1"}, "labels are 0 to 2"),
        (images, {"label": "cat"}, "no label 'cat': its labels are 0 to 2"),
        (plain, {"label": "0"}, "without labels.*bsi train RECIPE --data.labels"),
        (named, {"label": "CATS"}, "Did you mean 'cat'"),
        (named, {"label": "zebra"}, "its labels are cat, dog, 0, or 0 to 2"),
        (plain, {"labels": True}, "without labels"),
        (images, {"guidance": 2.0}, "needs --label or --labels"),
        (images, {"labels": True, "label": "1"}, "leave one out"),
        (images, {"out": tmp_path / "grid.jpg"}, "should end in .png"),
        (images, {"npz": tmp_path / "grid.zip"}, "should end in .npz"),
        (images, {"animate": tmp_path / "belief.mp4"}, r"\.gif or \.webp"),
        (images, {"out": tmp_path / "nowhere" / "grid.png"}, "no folder"),
        (images, {"animate": tmp_path / "belief.gif", "steps": 10**6}, "use fewer steps"),
        (images, {"num": 10**15}, "samples take 29802322.4 GiB of memory, .* are free: draw fewer"),
        (images, {"animate": tmp_path / "belief.gif", "npz": tmp_path / "others.npz"}, "seed 7 there, 0 here"),
        (images, {"rate": 8000}, "--rate is for"),
        (vectors, {"out": tmp_path / "grid.png"}, "no picture"),
    ):
        with pytest.raises(UsageError, match=message):
            write_samples(network, arguments(tmp_path, **changed))


def test_the_command_writes_a_picture_and_prints_a_summary(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished = read_trained(Path("digits"))
    command = Sample(Path("digits"), num=4, sampler=Sampler(steps=2), device="cpu")
    assert command.execute() == 0
    assert (tmp_path / "samples.png").exists()
    out, err = capsys.readouterr()
    assert f"4 samples, 3 evaluations each ({FLOW_SOLVER}, {Sampler.grid})" in out
    assert "bsi sample: " not in err
    monkeypatch.setattr("bsi.runtime.export.read_trained", lambda path, ema: replace(finished, step=500))
    assert replace(command, json=True).execute() == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num"] == 4
    assert "bsi sample: training of digits is unfinished: step 500 of 8000" in err


def test_a_failed_write_of_parts_leaves_no_folder(tmp_path, monkeypatch):
    def full(self: Path, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(BsiError, match=r"about\.json: No space left"):
        write_samples(model(), arguments(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_animation_draws_only_the_samples_it_shows(tmp_path):
    network, seen = model(), []
    network.denoiser.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    record = write_samples(network, arguments(tmp_path, num=40, npz=None, animate=tmp_path / "belief.webp"))
    assert sum(seen) == 16 * 5
    assert (record["num"], record["drawn"]) == (16, 16)
    torch.nn.init.constant_(next(network.denoiser.backbone.parameters()), float("nan"))
    for changed in ({}, {"npz": None, "animate": tmp_path / "belief.gif"}):
        with pytest.raises(NonFinite, match="10 samples drawn together hold NaN"):
            write_samples(network, arguments(tmp_path, **changed))
    assert not list(tmp_path.glob("*.gif"))


def test_a_run_is_sampled_as_during_its_training_unless_options_say_otherwise(tmp_path, capsys):
    quick = "--every.evaluate 0 --every.sample 0 --samples.sampler.solver sde2 --samples.sampler.steps 3"
    run = tmp_path / "run"
    assert main(f"train digits --steps 1 {quick} --device cpu --out {run}".split()) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "a.safetensors")]) == 0

    def drawn(source: Path, words: str = "") -> tuple[str, int, bytes]:
        options = f"--num 2 --device cpu --json --out {tmp_path / 'x.png'} {words}"
        capsys.readouterr()
        assert main(["sample", str(source), *options.split()]) == 0
        record = json.loads(capsys.readouterr().out)
        return record["solver"], record["evaluations"], (tmp_path / "x.png").read_bytes()

    assert drawn(run)[:2] == ("sde2", 4)
    assert drawn(run) == drawn(tmp_path / "a.safetensors") == drawn(run, "--steps 3 --solver sde2")
    assert drawn(run, f"--steps {Sampler.steps}")[:2] == ("sde2", Sampler.steps + 1)
    assert drawn(run, "--variance level")[:2] == ("posterior", 4)
    model = bsi.load(run)
    model.fit_variance(torch.tensor(open_dataset("digits").train[:64]), "level")
    assert model.sample(2, variance="level").shape == (2, 1, 8, 8)
    assert torch.equal(model.sample(2), model.sample(2, Sampler(steps=3, solver="sde2")))
    assert torch.equal(model.sample(2, steps=4), model.sample(2, steps=4, solver="sde2"))


def test_sound_is_written_as_wav_at_the_rate_of_its_dataset(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    for i in range(2):
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes((3000 * np.sin(np.arange(640) / (3 + i))).astype("<i2").tobytes())
    assert main(["data", "wav", "--from", ".", "--to", "data/tones", "--length", "16", "--test-fraction", "0"]) == 0
    words = "train audio-mini --data.name tones --backbone mlp-8x1 --steps 1 --batch 16 --every.evaluate 0"
    assert " ".join(words.split()[:4]) in capsys.readouterr().err  # as `bsi data wav` recommends
    assert main([*words.split(), "--device", "cpu", "--out", "run"]) == 0
    assert "bsi sample run --out samples.wav" in capsys.readouterr().err
    words = "sample run --num 3 --steps 2 --device cpu --npz all.npz --out all.wav"
    assert main(words.split()) == 0
    with wave.open("all.wav") as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (8000, 1, 2)
        sound = np.frombuffer(file.readframes(10**6), "<i2").astype(int).reshape(3, 18)  # 16 samples, 2 of silence
    assert np.array_equal(sound[:, :16] + 32768, array(tmp_path / "all.npz").astype(int)[:, 0])
    assert not sound[:, 16:].any()
    assert main(["sample", "run", "--num", "1", "--steps", "1", "--device", "cpu", "--rate", "4000"]) == 0
    with wave.open("samples.wav") as file:
        assert file.getframerate() == 4000
    manifest = tmp_path / "data" / "tones" / "manifest.json"
    for absurd in (10**12, -1, "fast"):
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"options": {"rate": absurd}}))
        assert main(["sample", "run", "--num", "1", "--steps", "1", "--device", "cpu"]) == 0
        assert "--rate" in capsys.readouterr().err
        with wave.open("samples.wav") as file:
            assert file.getframerate() == 16000
