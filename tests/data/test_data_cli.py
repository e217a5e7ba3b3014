"""`bsi data`: results on stdout, log messages on stderr, errors with their exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bsi.cli import main
from bsi.data.store import open_dataset


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_arrays_are_prepared_listed_and_opened_by_name(root, tmp_path, capsys):
    np.save(tmp_path / "moons.npy", np.random.default_rng(0).normal(size=(100, 2)))
    assert main(["data", "arrays", "--from", str(tmp_path / "moons.npy"), "--json"]) == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert (record["name"], record["shape"], record["folder"]) == ("moons", [2], str(root / "moons"))
    assert "prepare moons" in err
    assert open_dataset("moons").version == record["version"]

    assert main(["data", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [dataset["name"] for dataset in listed["datasets"]] == ["digits", "moons"]
    assert "cifar10" in listed["sources"]
    assert main(["data", "--list"]) == 0
    assert "moons: " in capsys.readouterr().out


def test_the_command_that_trains_on_arrays_depends_on_their_shape(root, tmp_path, capsys):
    for shape, options, command in (
        ((5,), "", "train arrays --data.name x, or table-mini"),
        ((1, 16), "", "train arrays --data.name x, or series-mini"),
        ((3, 8, 8), "--bins 0 1 256", "train folder --data.name x, or folder-mini"),
        ((8,), "--symbols 4", "train text-mini --data.name x"),
    ):
        data = np.random.default_rng(0).random((40, *shape))
        np.save(tmp_path / "x.npy", (4 * data).astype(int) if "symbols" in options else data)
        folder = root / str(len(options) + len(shape)) / "x"
        assert main(["data", "arrays", "--from", str(tmp_path / "x.npy"), "--to", str(folder), *options.split()]) == 0
        assert f"next: bsi {command}".replace(" x", f" {folder}") in capsys.readouterr().err


def test_a_folder_of_classes_is_listed_with_their_names(root, tmp_path, capsys):
    for i in range(60):
        path = tmp_path / "photos" / f"class{i % 12:02}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    assert main(["data", "folder", "--from", str(tmp_path / "photos"), "--size", "4", "--labels"]) == 0
    out, err = capsys.readouterr()
    assert "12 classes (class00, class01, " in out
    assert "class09, ...)" in out
    assert "bsi train folder --data.labels --data.name photos" in err
    assert main(["data", "--list"]) == 0
    out = capsys.readouterr().out
    assert "class09, ...)" in out
    assert "17 bins, 10 classes, version" in out  # the digits, whose labels are their names
    assert main(["data", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["datasets"]
    assert [dataset["classes"][-1:] for dataset in listed] == [[], ["class11"]]
    Image.new("RGB", (4, 4)).save(tmp_path / "photos" / "stray.png")
    assert main(["data", "folder", "--from", str(tmp_path / "photos"), "--to", str(root / "b"), "--labels"]) == 3
    assert "stray.png is in no class" in capsys.readouterr().err
    assert main(["data", "wav", "--from", str(tmp_path), "--labels"]) == 2
    assert capsys.readouterr().err.endswith("wav has no --labels; it takes --length, --test-fraction.\n")
    assert main(["data", "cifar10", "--labels"]) == 2
    assert "Labels in the data are kept" in capsys.readouterr().err


def test_options_of_another_source_are_rejected(root, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.arange(60) % 4)
    path = str(tmp_path / "x.npy")
    to = str(tmp_path / "elsewhere")
    assert main(["data", "arrays", "--from", path, "--to", to, "--bins", "0", "1", "4", "--test-fraction", "0"]) == 0
    dataset = open_dataset(to)
    assert (dataset.bins.high, len(dataset.train), len(dataset.test)) == (1.0, 60, 0)
    assert not root.exists()
    capsys.readouterr()
    for words, why in (
        (["arrays", "--from", path, "--size", "3"], "no --size; it takes --bins, --symbols, --test-fraction"),
        (["arrays", "--from", path, "--to", to, "--bins", "0", "1", "4"], "already holds a dataset"),
        (["arrays"], "--from PATH"),
        (["digits", "--from", path], "part of the package"),
        (["cifar-10"], "did you mean 'cifar10'"),
        (["nonsense"], "Use one of cifar10"),
        ([], "bsi data NAME"),
    ):
        assert main(["data", *words]) == 2
        out, err = capsys.readouterr()
        assert why in err
        assert out == ""
    Path(path).rename(tmp_path / "cifar10.npy")
    assert main(["data", "arrays", "--from", str(tmp_path / "cifar10.npy"), "--bins", "0", "1", "4"]) == 2
    assert "like a source" in capsys.readouterr().err


def test_invalid_data_has_exit_code_3_and_verify_finds_damage(root, tmp_path, capsys):
    assert main(["data", "folder", "--from", str(tmp_path / "nowhere")]) == 3
    np.save(tmp_path / "x.npy", np.random.default_rng(0).normal(size=100))
    words = ["data", "arrays", "--from", str(tmp_path / "x.npy"), "--verify"]
    assert main(words) == 0
    raw = bytearray((root / "x" / "train.npy").read_bytes())
    raw[-1] ^= 1
    (root / "x" / "train.npy").write_bytes(raw)
    capsys.readouterr()
    assert main(words) == 3
    assert "is damaged: expected sha256" in capsys.readouterr().err
    assert main(["data", "--list", "--verify"]) == 0
    assert "is damaged: expected sha256" in capsys.readouterr().err
    assert main(["data", "x", "--verify"]) == 3, "by the name of the dataset too"
    assert "is damaged: expected sha256" in capsys.readouterr().err
    assert main(["data", "x"]) == 0
    assert capsys.readouterr().out.startswith("x: ")


def test_the_digits_are_listed_without_torch_and_without_a_data_folder(root: Path) -> None:
    program = "import sys\nfrom bsi.cli import main\nmain(['data', '--list'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "digits: 1498 train, 299 test" in done.stdout
    assert not root.exists()


def test_inputs_that_are_no_data_are_rejected_without_blocking(root, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.npy")
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "device.npy").symlink_to("/dev/zero")
    odd = tmp_path / os.fsdecode(b"\xff.npy")
    np.save(odd, np.zeros((5, 2)))
    np.save(tmp_path / ".hidden.npy", np.zeros((5, 2)))
    paths = [*(tmp_path / f"{name}.npy" for name in ("pipe", "folder", "device", "x" * 300, ".hidden")), odd]
    for path in paths:
        for source in ("arrays", "folder", "wav", "cifar10", "imagenet32"):
            assert main(["data", source, "--from", str(path)]) in (2, 3)
            out, err = capsys.readouterr()
            assert out == ""
            assert "bsi data: " in err or path == odd, (source, path)
    assert not root.exists() or not list(root.glob("*"))


def test_a_run_finds_a_renamed_dataset_by_its_content(root, tmp_path, capsys):
    np.save(tmp_path / "moons.npy", np.random.default_rng(0).normal(size=(100, 2)))
    where = ["--from", str(tmp_path / "moons.npy"), "--to", str(root / "moons2")]
    assert main(["data", "arrays", *where]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("moons2: ")
    assert "--data.name moons2" in err
    assert main(["data", "--list"]) == 0
    assert "  moons2: " in capsys.readouterr().out
    run = tmp_path / "run"
    small = ["--steps", "2", "--batch", "64", "--backbone", "mlp-16x1", "--device", "cpu"]
    assert main(["train", "arrays", "--data.name", "moons2", "--out", str(run), *small]) == 0
    (root / "moons2").rename(root / "renamed")
    capsys.readouterr()
    assert main(["eval", str(run), "--bpd", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"] == "renamed"
    assert main(["train", "arrays", "--data.name", "moons2", "--out", str(run), *small]) == 0
    assert "is finished: 2 steps" in capsys.readouterr().err
