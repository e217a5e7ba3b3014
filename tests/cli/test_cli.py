"""The command line as a table of commands: one message for a mistake, with the right exit code.

Commands run in this process, unless a test is about imports or about what is written to which stream.
"""

import io
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import bsi
from bsi.cli import COMMANDS, main
from bsi.cli.options import completion
from bsi.data.store import open_dataset
from bsi.errors import UsageError
from bsi.runtime.export import find_bundled

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def call(words: str) -> int:
    """The exit code of `bsi words`."""
    return main(words.split())


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, no data, no network: the proxies point to a closed port."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers the proxies of the first request
    return tmp_path


WRONG: list[tuple[str, int, str]] = [
    # typos
    ("smaple digits", 2, "Did you mean `bsi sample`?"),
    ("sample digits --nmu 3", 2, "--num"),
    ("sample digits --solver sde3", 2, "did you mean 'sde2'"),
    ("sample digits --grid geo", 2, "did you mean 'geometric'"),
    ("quux", 2, "`bsi --help` lists the commands"),
    ("--completion tcsh", 2, "bash or zsh"),
    ("train digitz", 2, "did you mean 'digits'"),
    ("train digits --optimiser.lr 1", 2, "--optimizer.lr"),
    ("train digits --stepz 3", 2, "--steps"),
    ("train digits --lr 3", 2, "--optimizer.lr"),
    ("train digits --method ddpm", 2, "bsi, bfn, vdm"),
    ("train digits --backbone dit-q/2", 2, "did you mean"),
    ("train digits --samples.sampler.solver sde9 --device cpu", 2, "did you mean 'sde2'"),
    # missing or superfluous words
    ("sample", 2, "required"),
    ("eval digits", 2, "--bpd, --fid"),
    ("eval digits digits --bpd", 2, "take one run"),
    ("train digits --method", 2, "--method needs a value"),
    # wrong types
    ("sample digits --num many", 2, "--num"),
    ("train digits --steps many", 2, "--steps"),
    ("view digits --port http", 2, "--port"),
    ("bench fly", 2, "'train', 'sample', 'elbo'"),
    # numbers out of range
    ("sample digits --num 0", 2, "at least 1, got 0"),
    ("sample digits --steps 0", 2, "at least one"),
    ("train digits --steps 0 --out x", 2, "at least 1"),
    ("train digits --batch 0 --out x", 2, "at least 1"),
    ("fid a b --num 0", 2, "at least 1, got 0"),
    ("view digits --port 99999999", 2, "65535"),
    (f"sample digits --seed {10**40}", 2, "2^63, got a number of 41 digits"),
    (f"sample digits --num {10**12}", 2, "memory"),
    (f"sample digits --steps {10**12}", 2, "at most 1000000"),
    (f"eval digits --bpd --measure {10**12}", 2, "at most 1000000"),
    (f"study finite-k --seeds {10**12} --plan", 2, "at most 1000"),
    ("data folder --from . --skip -1", 2, "at least 0, got -1"),
    ("compress digits digits -o x --steps 0 --variance none", 2, "steps"),
    ("sample digits --guidance 1e999", 2, "finite"),
    ("export digits --sigma-rel nan", 2, "got nan"),
    # missing or unsuitable files
    ("sample nowhere", 2, "`bsi train`"),
    ("view nowhere", 2, "`bsi train`"),
    ("sample digits --out nowhere/samples.png", 2, "nowhere"),
    ("report digits", 2, "run folder"),
    ("export digits --out nowhere/d.safetensors", 2, "nowhere"),
    ("fid nowhere elsewhere", 3, "`bsi data"),
    ("train cifar10-dit-s --out x --device cpu", 3, "`bsi data NAME` prepares one"),
    ("train folder-mini --out x --device cpu", 3, "`bsi data folder --from IMAGES` prepares one"),
    ("compress digits nowhere -o x", 3, "nowhere"),
    ("compress digits floats.npy -o x", 3, "integers"),
    ("compress digits wide.npy -o x", 2, "shape"),
    ("compress digits digits -o nowhere/x", 2, "nowhere"),
    ("decompress floats.npy digits -o x.npy", 3, "bsi compress"),
    ("decompress nowhere digits -o x.npy", 3, "nowhere"),
    # offline
    ("data cifar10", 3, "with --from, or run the same command again"),
]


@pytest.mark.parametrize(("words", "code", "expected"), WRONG, ids=[words for words, _, _ in WRONG])
def test_usage_errors_are_one_message(words, code, expected, capsys, elsewhere):
    if "compress" in words:
        pytest.importorskip("constriction")
    np.save("floats.npy", np.zeros((3, 1, 8, 8)))
    np.save("wide.npy", np.zeros((3, 1, 8, 9), np.uint8))
    assert call(words) == code
    out, err = capsys.readouterr()
    assert expected in out + err
    assert "Traceback" not in out + err
    assert len(err.splitlines()) < 25
    assert sorted(path.name for path in elsewhere.rglob("*") if path.is_file()) == ["floats.npy", "wide.npy"]


def test_an_unexpected_error_is_one_line_with_a_hint(monkeypatch, capsys):
    """Row 70."""

    def fails() -> None:
        raise KeyError("a\nb" * 1000)

    monkeypatch.setattr("bsi.cli.doctor.examine", fails)
    assert call("doctor") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bsi doctor: unexpected error: KeyError: ")
    assert line.endswith("Run the same command with --debug for the traceback.")
    assert len(line) < 700
    for words in ("doctor --debug", "--debug doctor"):
        with pytest.raises(KeyError):
            call(words)
    with pytest.raises(UsageError, match="neither a run folder"):
        call("sample nowhere --debug")


def test_an_interrupted_command_ends_quietly(monkeypatch, capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bsi.cli.doctor.examine", interrupted)
    assert call("doctor") == 130
    assert capsys.readouterr().err.strip() == "bsi doctor: interrupted"


TAKE_FILES = [
    "sample {}",
    "sample digits --num 1 --steps 1 --device cpu --npz {}.npz",
    "sample digits --num 1 --steps 1 --device cpu --out {}.png",
    "eval digits --bpd --data {}",
    "eval digits --bpd --limit 2 --device cpu --per-sample {}",
    "report {} --no-model",
    "view {} --no-browser",
    "export digits --out {}",
    "export digits --hub-folder {}/x",
    "train digits --init-from {} --steps 1 --device cpu",
    "train digits --out {}/x --steps 1 --device cpu --backbone mlp-8x1 --every.evaluate 0 --every.sample 0",
    "data arrays --from {}.npz",
    "data folder --from {}",
    "data wav --from {}",
    "data cifar10 --from {}",
    "compress digits {}.npy -o new.bsi",
    "decompress {} digits -o new.npy",
    "fid {0}.npy {0}.npz",
    "fid {0} {0} --weights {0}",
    "study finite-k --out {}/x",
]
WRITING = [words for words in TAKE_FILES if re.search("--(npz|out|per-sample|hub-folder|to) ", words)]


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "a" * 300, os.fsdecode(b"caf\xe9")])
@pytest.mark.parametrize("words", TAKE_FILES)
def test_paths_that_are_no_regular_file_are_rejected_without_blocking(
    words, kind, elsewhere, monkeypatch, capsysbinary
):
    """Row 71: a folder, a pipe, a loop of links, a name that is too long or not UTF-8 where a file is expected."""

    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("served")

    monkeypatch.setattr("bsi.app.server.server_of", never)
    monkeypatch.setattr("bsi.studies.runner.run", lambda *args: [])
    for suffix in ("", ".npz", ".npy", ".png"):
        path = elsewhere / f"{kind}{suffix}"
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "loop":
            path.symlink_to(path.name)
    code = main([word.format(kind) for word in words.split()])
    err = capsysbinary.readouterr().err.decode(errors="replace")
    if code == 0:  # a folder or a name that can be written
        assert words in WRITING
        assert kind == "folder" or kind.startswith("caf")
        return
    assert code in (1, 2, 3), err
    assert "unexpected" not in err
    assert f"bsi {words.split()[0]}: " in err.splitlines()[-1]


@pytest.mark.parametrize("columns", ["1", "x", "9" * 30])
def test_a_terminal_of_any_width_gets_help(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for words in ("--help", "train", "train digits --help", *(f"{name} --help" for name in COMMANDS)):
        assert call(words) == (2 if words == "train" else 0), words


@no_gpu
@pytest.mark.parametrize(
    "words", ["train digits --out x", "sample digits", "view digits", "bench train", "eval digits --bpd", "fid . ."]
)
def test_a_missing_gpu_is_one_message(words, capsys):
    Image.new("RGB", (8, 8)).save("a.png")
    assert call(f"{words} --device cuda") == 2
    err = capsys.readouterr().err
    assert "CUDA" in err
    assert "cpu" in err
    assert "Traceback" not in err


def test_a_truncated_export_is_reported_as_damaged(capsys):
    assert call("export digits --out whole.safetensors") == 0
    raw = Path("whole.safetensors").read_bytes()
    for size in (5000, len(raw) - 1):
        Path("part.safetensors").write_bytes(raw[:size])
        assert call("sample part.safetensors") == 4
        assert "is damaged" in " ".join(capsys.readouterr().err.split())


def test_a_wrong_name_of_a_run_suggests_the_right_one(elsewhere, capsys):
    for name in ("shapes", "points"):
        (elsewhere / "runs" / name / "checkpoints").mkdir(parents=True)
    for run, hint in (("runs/shape", "Did you mean runs/shapes"), ("runs", "runs/points"), ("runs", "runs/shapes")):
        assert call(f"sample {run}") == 2
        assert hint in " ".join(capsys.readouterr().err.split())
    assert call("sample runs/quux") == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_a_local_file_takes_precedence_over_a_bundled_network(elsewhere, capsys):
    assert find_bundled(Path("digits")).parent.name == "pretrained"
    assert find_bundled(Path("runs/digits")) == Path("runs/digits")
    (elsewhere / "digits").mkdir()
    assert find_bundled(Path("digits")) == Path("digits")
    assert call("sample digits") == 2
    assert "hides the bundled network" in " ".join(capsys.readouterr().err.split())


def test_the_description_of_the_bundled_network_is_right():
    file = find_bundled(Path("digits"))
    assert file.stat().st_size < 1_000_000
    claim = re.search(r"each: ([\d.]+) bits/dim", file.with_suffix(".txt").read_text())
    test = torch.from_numpy(open_dataset("digits").test.copy())
    found = bsi.load("digits").bits_per_dim(test, measure=4, recon=2)
    assert found.bits_per_dim == pytest.approx(float(claim[1]), abs=4 * found.monte_carlo_error)
    assert found.monte_carlo_error < 0.06


# ---- Help, JSON and completion ---------------------------------------------------------------------------------------

HELP = """
import contextlib, io, json, os, sys
os.environ["COLUMNS"] = "80"
from bsi.cli import COMMANDS, main
found = {}
general = [["--help"], ["--version"], ["--completion", "bash"], ["train", "digits", "--help"],
           ["train", "cifar10-20min-bpd", "--help"]]
for words in (*general, *([name, "--help"] for name in COMMANDS)):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(list(words))
    found[" ".join(words)] = {"code": code, "text": out.getvalue(), "torch": "torch" in sys.modules}
print(json.dumps(found))
"""


def test_help_of_every_command_imports_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for words, record in found.items():
        assert (record["code"], record["torch"]) == (0, False), words
        assert record["text"], words
        if words.endswith(" --help"):
            lines = record["text"].splitlines()[1:]  # the first is the usage
            assert max(map(len, lines)) <= 80, words  # text is broken between words, not by the terminal
            assert "{None" not in record["text"], words
    for name, command in COMMANDS.items():
        assert f"{name} --help" in found
        assert name in found["--help"]["text"]
        assert command.summary in found["--help"]["text"]
    assert "--json " in found["sample --help"]["text"]
    assert "--no-json" not in found["sample --help"]["text"]
    assert "None" not in found["eval --help"]["text"]
    digits, likelihood = (
        " ".join(found[f"train {name} --help"]["text"].replace("│", " ").split())
        for name in ("digits", "cifar10-20min-bpd")
    )
    assert "None" not in digits
    assert "--optimizer.lr" in digits
    assert "--method.alpha-M FLOAT (default: 10000.0)" in digits  # the recipe's value is the default
    assert "(default: expected)" in likelihood


@pytest.mark.parametrize(
    "words",
    ["data digits", "study finite-k --plan"],
)
def test_json_output_is_valid(words, capsys):
    assert call(f"{words} --json") == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_in_bash_knows_commands_options_and_names():
    lines = ["bsi v", "bsi ", "bsi view --po", "bsi train cifar10-d", "bsi train digits --opt", "bsi sample --so"]
    script = completion(["bash"])
    for line in lines:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        script += f"\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE='{line}'; _tyro_bsi"
        script += '\necho "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "--norc"], input=script, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    command, commands, port, recipes, optimizer, solver = (line.split() for line in done.stdout.splitlines())
    assert (command, port, solver) == (["view"], ["--port"], ["--solver"])
    assert set(commands) >= set(COMMANDS)
    assert recipes == ["cifar10-dit-mini", "cifar10-dit-s"]
    assert "--optimizer.lr" in optimizer


def test_completion_in_zsh_is_valid():
    script = completion(["zsh"])
    assert all(name in script for name in COMMANDS)
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True)


# ---- Streams and terminals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--help", "data --list"])
def test_a_closed_pipe_is_no_error(words):
    read, write = os.pipe()
    os.close(read)  # as `| head -0` does
    done = subprocess.run(
        [sys.executable, "-m", "bsi", *words.split()], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_work_continues_when_stderr_is_closed(tmp_path):
    """And exit codes do not change."""
    read, write = os.pipe()
    os.close(read)
    for size, code in (("64", 0), ("-1", 2)):
        words = ["train", "digits", "--steps", "4", "--batch", size, "--every.evaluate", "2", "--out", "run"]
        done = subprocess.run([sys.executable, "-m", "bsi", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=write)
        assert done.returncode == code
    os.close(write)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


def test_help_works_in_an_ascii_locale(monkeypatch):
    for words in ("", *(f"{name} --help" for name in COMMANDS), "doctor"):
        out = io.TextIOWrapper(io.BytesIO(), "ascii")  # strict, as stdout is in a locale other than C
        monkeypatch.setattr("sys.stdout", out)
        call(words)
        text = out.buffer.getvalue().decode("ascii")
        assert len(text) > 100, words
        assert "?" not in text.replace("Fr?chet", ""), words


@pytest.mark.parametrize("wish", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_no_color_is_respected(wish):
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "bsi", "sample", "digits", "--num", "many"]
    subprocess.run(command, stdin=end, stdout=end, stderr=end, env={**os.environ, **wish})
    output = os.read(terminal, 1 << 16)
    os.close(end)
    os.close(terminal)
    assert b"bsi " in output
    assert b"\x1b" not in output


def test_file_names_that_are_not_utf_8_are_printed(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["export", "digits", "--out", os.fsdecode(b"caf\xe9.safetensors")]) == 0
    assert out.buffer.getvalue() == b"caf\xe9.safetensors\n"


@pytest.mark.slow
def test_commands_work_without_standard_streams(elsewhere):
    requested = "sample digits --num 2 --steps 2 --out s.png --json"
    for closed in (">&-", ">&- 2>&-"):
        done = subprocess.run(
            f"{sys.executable} -m bsi {requested} {closed}", shell=True, capture_output=True, text=True
        )
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    for redirected in ("2>&-", ""):  # text for stderr is never on stdout, and has no colors in a pipe
        command = f"{sys.executable} -m bsi {requested} {redirected}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert json.loads(done.stdout)["files"] == ["s.png"]
        assert "\x1b" not in done.stderr


# ---- What to do next -------------------------------------------------------------------------------------------------


def test_a_folder_of_images_passes_through_all_commands(elsewhere, capsys):
    """Each command prints the next one, with names quoted for the shell."""
    photos = elsewhere / "my photos" / "2026"
    photos.mkdir(parents=True)
    for i in range(40):
        Image.new("RGB", (70 + i, 80), (i, 2 * i, 3 * i)).save(photos / f"{i}.png")
    assert main(["data", "folder", "--from", "my photos", "--size", "8"]) == 0
    assert "bsi train folder --data.name 'my photos', or folder-mini on a CPU" in capsys.readouterr().err
    assert main(["data", "folder", "--from", "my photos", "--size", "64", "--to", "large"]) == 0
    assert re.search(r"bsi train folder --backbone dit-s/4 --data.name \S*large, or", capsys.readouterr().err)
    words = ["train", "folder-mini", "--data.name", "my photos", "--device", "cpu", "--out", "runs/my run"]
    assert main([*words, "--steps", "1", "--batch", "16", "--every.evaluate", "1"]) == 0
    out, err = capsys.readouterr()
    assert out == "runs/my run\n"
    assert "parameters on my photos: " in err
    assert "samples of 3 x 8 x 8" in err
    assert re.search(r"step 1: test .*bits/dim", err)
    assert "bsi eval 'runs/my run' --bpd" in err
    assert call("train folder --data.name photos") == 3
    assert "--data.name NAME trains on another: 'digits', 'my photos'" in capsys.readouterr().err


def test_arrays_pass_through_all_commands(capsys):
    np.save("few.npy", np.random.default_rng(0).normal(size=(64, 3)))
    assert call("data arrays --from few.npy --test-fraction 0.001") == 0
    err = capsys.readouterr().err
    assert "warning: there are no test samples" in err
    assert "bsi train arrays --data.name few, or table-mini on a CPU" in err
    assert call("train arrays --data.name few --device cpu --steps 1 --batch 64") == 0
    assert "bsi sample runs/arrays --npz runs/arrays/samples.npz" in capsys.readouterr().err
    assert call("eval runs/arrays --bpd --split train --device cpu") == 0
    bound, terms = capsys.readouterr().out.splitlines()[:2]
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", terms)]
    assert "nats/dim" in bound
    assert float(bound.split()[0]) == pytest.approx(sum(numbers), abs=1e-3)  # the terms have the unit of their sum


def test_the_next_command_after_training_on_text_prints_samples(capsys):
    Path("words.txt").write_text("the cat sat on the mat. " * 20)
    assert call("data text --from words.txt --length 8") == 0
    words = "train text-mini --data.name words --backbone mlp-8x1 --steps 1 --batch 8 --every.evaluate 0 --device cpu"
    assert call(words) == 0
    following = re.search(r"next: bsi (sample [^·]*)", capsys.readouterr().err)
    assert following is not None
    assert call(following[1] + " --steps 2 --device cpu") == 0
    assert "4 samples" in capsys.readouterr().out


def test_an_unsuitable_network_gives_a_warning(capsys, monkeypatch):
    def announce(*args: object, begin: Callable[[torch.device], None], **kwargs: object) -> None:
        begin(torch.device("cpu"))
        raise KeyboardInterrupt

    monkeypatch.setattr("bsi.training.train.train", announce)
    for words, warning in (
        ("digits --backbone dit-l/2", r"take about [\d,]+ hours on this CPU. `bsi train folder-mini` is made for"),
        ("folder-mini --data.name digits --batch 65536", "on this CPU. Use a smaller --backbone, --batch and --steps."),
        ("arrays --data.name digits", "warning: an MLP treats images as vectors. Use `bsi train folder`"),
        ("digits", "(?s)^(?!.*warning)"),
    ):
        assert call(f"train {words} --device cpu") == 130
        assert re.search(warning, capsys.readouterr().err)


def test_the_demo_writes_samples_a_report_and_numbers(capsys):
    assert main(["demo", "--out", "my demo", "--steps", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "bsi view 'my demo' · " in err
    found = json.loads(out)
    assert math.isfinite(found["bits_per_dim"])
    assert found["monte_carlo_error"] > 0
    assert found["baselines"]["histogram"] == pytest.approx(2.44, abs=0.005)
    assert Image.open(found["samples"]).size[0] > 64
    (record,) = Path("my demo/evaluations").glob("*-bpd-test-*.json")
    assert json.loads(record.read_text())["bits_per_dim"] == found["bits_per_dim"]
    report = Path(found["report"]).read_text()
    assert "<html" in report[:200].lower()
    assert f"<b>{found['bits_per_dim']:.4f}</b>" in report  # the same number everywhere


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("starlette", "view digits", "view"),
        ("torch.utils.tensorboard", "train digits --track tensorboard --steps 1 --device cpu", "tensorboard"),
        ("huggingface_hub", "export digits --hub-folder hub --upload user/name", "hub"),
        ("datasets", "data huggingface --from mnist", "hub"),
    ],
)
def test_a_missing_extra_is_one_message_with_the_command_that_installs_it(package, words, extra, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith(("bsi.app", f"{package}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert call(words) == 2
    assert f"Run: pip install 'bsi[{extra}]'" in capsys.readouterr().err
