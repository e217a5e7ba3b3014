"""The command line as a table of commands: what is wrong is told in one message, with the right exit code.

Row 29 of docs/reliability.md. Commands run in this process, through the function that `bsi` is, unless what matters is
a process of their own: what it imports, and what it writes where.
"""

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import bsi
from bsi.cli import COMMANDS, main
from bsi.cli.options import completion, fill
from bsi.data.store import open_dataset
from bsi.errors import UsageError
from bsi.runtime.export import find_bundled

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def call(*words: str) -> int:
    """The exit code of `bsi words...`."""
    return main(list(words))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, no data, no network: proxies lead to a port where nobody listens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(
        urllib.request, "_opener", None
    )  # it remembers the proxies of the first request, here and after
    return tmp_path


WRONG: list[tuple[str, int, str]] = [
    # a typo in a command, an option, a name
    ("smaple digits", 2, "Did you mean `bsi sample`?"),
    ("quux", 2, "`bsi --help` lists the commands"),
    ("sample digits --nmu 3", 2, "--num"),
    ("train digits --step 10", 2, "--steps"),
    ("train digits --optimiser.lr 1", 2, "--optimizer.lr"),
    ("doctor --jsno", 2, "--json"),
    ("train digts", 2, "Did you mean 'digits'?"),
    ("train digits --method bis", 2, "bsi, bfn, vdm"),
    ("train digits --backbone dit-q/2", 2, "dit-"),
    ("data cifra10", 2, "Did you mean 'cifar10'?"),
    ("sample digits --solver sde3", 2, "did you mean 'sde2'"),
    ("sample digits --solver rk4", 2, "unknown solver 'rk4': the solvers are posterior, sde2"),
    ("sample digits --grid geo", 2, "did you mean 'geometric'"),
    ("eval digits", 2, "--bpd, --fid"),
    ("--completion tcsh", 2, "bash or zsh"),
    # a missing or needless word
    ("sample", 2, "required"),
    ("view", 2, "required"),
    ("train", 2, ""),
    ("eval digits digits --bpd", 2, "take one run"),
    # a wrong type
    ("sample digits --num many", 2, "--num"),
    ("train digits --optimizer.lr fast", 2, "--optimizer.lr"),
    ("view digits --port http", 2, "--port"),
    ("bench fly", 2, "'train', 'sample', 'elbo'"),
    ("sample digits --out samples.exe", 2, ".png"),
    # numbers that mean nothing
    ("sample digits --num 0", 2, "at least 1, got 0"),
    ("sample digits --num -3", 2, "at least 1, got -3"),
    ("sample digits --steps 0", 2, "at least one"),
    ("train digits --steps 0 --out x", 2, "at least 1"),
    ("train digits --batch 0 --out x", 2, "at least 1"),
    ("bench train --batch 0", 2, "at least 1"),
    ("view digits --port 99999999", 2, "65535"),
    ("eval digits --bpd --limit 0", 2, "at least 1"),
    # numbers that nothing can have
    (f"sample digits --seed {10**40}", 2, "2^63, got a number of 41 digits"),
    (f"sample digits --num {10**12}", 2, "memory"),
    (f"sample digits --steps {10**12}", 2, "at most 1000000"),
    (f"eval digits --bpd --measure {10**12}", 2, "at most 1000000"),
    (f"study finite-k --seeds {10**12} --plan", 2, "at most 1000"),
    ("data folder --from . --skip -1", 2, "at least 0, got -1"),
    ("sample digits --guidance 1e999", 2, "finite"),
    ("export digits --sigma-rel nan", 2, "got nan"),
    # what is not there
    ("sample nowhere", 2, "`bsi train`"),
    ("view nowhere", 2, "`bsi train`"),
    ("report nowhere", 2, "`bsi train`"),
    ("export nowhere", 2, "`bsi train`"),
    ("sample digits --out nowhere/samples.png", 2, "nowhere"),
    ("report digits", 2, "run folder"),
    ("export digits --out nowhere/d.safetensors", 2, "nowhere"),
    ("fid nowhere elsewhere", 3, "`bsi data"),
    ("train cifar10-dit-s --out x --device cpu", 3, "`bsi data NAME` prepares one"),
    ("train folder-mini --out x --device cpu", 3, "`bsi data folder --from IMAGES` prepares one"),
    # offline
    ("data cifar10", 3, "with --from, or run the same command again"),
]


@pytest.mark.parametrize(("words", "code", "told"), WRONG, ids=[words for words, _, _ in WRONG])
def test_what_is_wrong_is_told_in_one_message(
    words: str, code: int, told: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert call(*words.split()) == code
    out, err = capsys.readouterr()
    assert told in out + err
    assert "Traceback" not in out + err
    assert len(err.splitlines()) < 25
    assert not (elsewhere / "x" / "checkpoints").exists()


def test_an_unexpected_error_is_one_line_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 70."""

    def fails() -> None:
        raise KeyError("a\nb" * 1000)

    monkeypatch.setattr("bsi.cli.doctor.examine", fails)
    assert call("doctor") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bsi doctor: unexpected error: KeyError: ")
    assert line.endswith("Run the same command with --debug for the traceback.")
    assert len(line) < 700
    with pytest.raises(KeyError):
        call("doctor", "--debug")


TAKE_FILES = [
    "sample {}",
    "sample digits --num 1 --steps 1 --device cpu --npz {}.npz",
    "sample digits --num 1 --steps 1 --device cpu --out {}.png",
    "eval {} --bpd",
    "eval digits --bpd --data {}",
    "eval digits --bpd --limit 2 --device cpu --per-sample {}",
    "report {} --no-model",
    "view {} --no-browser",
    "export {}",
    "export digits --out {}",
    "export digits --hub-folder {}/x",
    "train digits --init-from {} --steps 1 --device cpu",
    "train digits --out {}/x --steps 1 --device cpu",
    "train digits --data.name {}",
    "data arrays --from {}",
    "data arrays --from {}.npy",
    "data arrays --from {}.npz",
    "data folder --from {}",
    "data wav --from {}",
    "data cifar10 --from {}",
    "data imagenet32 --from {}",
    "data digits --to {}/x",
    "fid {0}.npy {0}.npz",
    "fid {0} {0} --weights {0}",
    "study finite-k --out {}/x",
]


WRITING = [words for words in TAKE_FILES if re.search("--(npz|out|per-sample|hub-folder|to) ", words)]


@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "a" * 300, os.fsdecode(b"caf\xe9")])
@pytest.mark.parametrize("words", TAKE_FILES)
def test_what_is_no_file_is_one_message_and_no_hang(
    words: str, kind: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Row 71: a folder, a pipe, a loop of links, a name that is too long or not UTF-8 where a file is expected."""

    def never(*args: object, **kwargs: object) -> None:
        pytest.fail("served")

    monkeypatch.setattr("bsi.app.server.server_of", never)
    monkeypatch.setattr("bsi.studies.runner.run", lambda *args: [])
    for suffix in ("", ".npz", ".npy", ".png"):
        if kind == "folder":
            (elsewhere / f"{kind}{suffix}").mkdir()
        elif kind == "pipe":
            os.mkfifo(elsewhere / f"{kind}{suffix}")
        elif kind == "loop":
            (elsewhere / f"{kind}{suffix}").symlink_to(f"{kind}{suffix}")
    code = call(*(word.format(kind) for word in words.split()))
    err = capsysbinary.readouterr().err.decode(errors="replace")
    if code == 0:  # a folder or a name that can be written
        assert words in WRITING
        assert kind == "folder" or kind.startswith("caf")
        return
    assert code in (1, 2, 3), err
    assert "unexpected" not in err
    assert f"bsi {words.split()[0]}: " in err.splitlines()[-1]


@pytest.mark.parametrize("columns", ["1", "0", "-5", "x", "9" * 30])
def test_a_terminal_of_any_width_gets_help(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in ("--help", "train", "train digits --help", *(f"{name} --help" for name in COMMANDS)):
        assert call(*words.split()) == (2 if words == "train" else 0), words


@no_gpu
@pytest.mark.parametrize(
    "words", ["train digits --out x", "sample digits", "view digits", "bench train", "eval digits --bpd"]
)
def test_a_gpu_that_is_not_there_is_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words.split(), "--device", "cuda") == 2
    err = capsys.readouterr().err
    assert "CUDA" in err
    assert "cpu" in err
    assert "Traceback" not in err


def test_a_folder_that_hides_a_bundled_network_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert call("sample", "digits") == 2
    assert "hides the bundled network" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_almost_that_name_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shapes", "points"):
        (tmp_path / "runs" / name / "checkpoints").mkdir(parents=True)
    for asked, meant in (("runs/shape", "runs/shapes"), ("runs", "runs/points"), ("runs", "runs/shapes")):
        assert call("sample", asked) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "Did you mean" in said
        assert meant in said
    assert call("sample", "runs/quux") == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_an_export_that_is_not_whole_is_told_from_what_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("export", "digits", "--out", "whole.safetensors") == 0
    raw = Path("whole.safetensors").read_bytes()
    for size in (5000, len(raw) - 1):
        Path("part.safetensors").write_bytes(raw[:size])
        assert call("sample", "part.safetensors") == 4
        assert "is damaged" in " ".join(capsys.readouterr().err.split())


def test_debug_shows_where_it_went_wrong() -> None:
    with pytest.raises(UsageError, match="neither a run folder"):
        main(["--debug", "sample", "nowhere"])
    with pytest.raises(UsageError, match="neither a run folder"):
        main(["sample", "nowhere", "--debug"])


def test_an_interrupted_command_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bsi.cli.doctor.examine", interrupted)
    assert call("doctor") == 130
    assert capsys.readouterr().err.strip() == "bsi doctor: interrupted"


def test_names_with_hyphens_stay_whole_in_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert fill("studies: initial-precision", "  ") == "  studies:\n  initial-precision"


# ---- In a process of its own ---------------------------------------------------------------------------------------

HELP = """
import contextlib, io, json, os, sys
os.environ["COLUMNS"] = "80"
from bsi.cli import COMMANDS, main
heavy = ("torch", "numpy", "PIL", "matplotlib", "fastapi", "safetensors")
found = {}
general = [["--help"], ["--version"], ["--completion", "bash"], ["train", "digits", "--help"],
           ["train", "cifar10-20min-bpd", "--help"]]
for words in (*general, *([name, "--help"] for name in COMMANDS)):
    out = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out):
        try:
            code = main(list(words))
        except SystemExit as left:
            code = int(left.code or 0)
    found[" ".join(words)] = {"code": code, "text": out.getvalue(), "heavy": [m for m in heavy if m in sys.modules]}
print(json.dumps(found))
"""


def test_help_of_every_command_imports_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found) >= {f"{name} --help" for name in COMMANDS}
    for words, record in found.items():
        assert record["code"] == 0, words
        assert record["text"], words
        assert "torch" not in record["heavy"], words
    for name, command in COMMANDS.items():
        assert name in found["--help"]["text"]
        assert command.summary in found["--help"]["text"]
    assert "--optimizer.lr" in found["train digits --help"]["text"]
    for words, record in found.items():
        if words.endswith(" --help"):
            lines = record["text"].splitlines()[1:]  # the first says how it is used
            assert max(map(len, lines)) <= 80, words  # text is broken between words, not by the terminal
            assert "{None" not in record["text"], words  # nothing to type
    assert "--json " in found["sample --help"]["text"]
    assert "--no-json" not in found["sample --help"]["text"]
    assert "None" not in found["eval --help"]["text"]
    digits = " ".join(re.sub("│", " ", found["train digits --help"]["text"]).split())
    assert "None" not in digits  # which would be refused
    likelihood = " ".join(re.sub("│", " ", found["train cifar10-20min-bpd --help"]["text"]).split())
    assert "(default: expected)" in likelihood  # what a recipe has set is its default
    assert "the defaults are the paper's" not in digits  # whose alpha_M is another
    assert "--method.alpha-M FLOAT (default: 10000.0)" in digits


def test_nothing_is_written_to_stdout_but_the_answer(tmp_path: Path) -> None:
    """JSON on stdout, logs on stderr: `bsi ... --json | jq` works."""
    words = ["sample", "digits", "--num", "2", "--steps", "2", "--out", str(tmp_path / "s.png"), "--json"]
    done = subprocess.run([sys.executable, "-m", "bsi", *words], capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    assert record["num"] == 2
    assert "sample" in done.stderr  # progress
    assert "\x1b" not in done.stdout + done.stderr  # plain lines in a pipe


@pytest.mark.parametrize(
    "words",
    [
        "doctor --json",
        "data --list --json",
        "train --list --json",
        "data digits --json",
        "train digits --dry-run --json",
        "study finite-k --plan --json",
    ],
)
def test_json_is_json(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(*words.split()) == 0
    assert json.loads(capsys.readouterr().out)


def test_a_bundled_network_is_there_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sample", "digits", "--num", "3", "--steps", "4", "--npz", "s.npz", "--device", "cpu") == 0
    import numpy as np

    with np.load(tmp_path / "s.npz") as arrays:
        images = arrays["arr_0"]
    assert images.shape == (3, 1, 8, 8)
    assert images.max() <= 16
    assert "3 samples" in capsys.readouterr().out


def test_the_bundled_network_is_what_its_text_says() -> None:
    file = find_bundled(Path("digits"))
    assert file.stat().st_size < 1_000_000
    claim = re.search(r"each: ([\d.]+) bits/dim", file.with_suffix(".txt").read_text())
    test = torch.from_numpy(open_dataset("digits").test.copy())
    found = bsi.load("digits").bits_per_dim(test, measure=8, recon=2)
    assert found.bits_per_dim == pytest.approx(float(claim[1]), abs=4 * found.monte_carlo_error)
    assert found.monte_carlo_error < 0.04


def test_a_file_of_ones_own_comes_before_a_bundled_one(elsewhere: Path) -> None:
    assert find_bundled(Path("digits")).parent.name == "pretrained"
    assert find_bundled(Path("runs/digits")) == Path("runs/digits")
    (elsewhere / "digits").mkdir()
    assert find_bundled(Path("digits")) == Path("digits")


# ---- Completion ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_names() -> None:
    script = completion(["bash"])

    def completed(*words: str) -> list[str]:
        line = " ".join(f"'{word}'" for word in words)
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}'; _tyro_bsi"
        code = f"{script}\n{asked}; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "--norc"], input=code, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [word.strip() for word in done.stdout.splitlines()]

    assert completed("bsi", "v") == ["view"]
    assert set(completed("bsi", "")) >= set(COMMANDS)
    assert completed("bsi", "view", "--po") == ["--port"]
    assert completed("bsi", "train", "cifar10-d") == ["cifar10-dit-mini", "cifar10-dit-s"]
    assert "--optimizer.lr" in completed("bsi", "train", "digits", "--opt")
    assert completed("bsi", "sample", "--so") == ["--solver"]


def test_zsh_reads_its_script() -> None:
    script = completion(["zsh"])
    assert all(name in script for name in COMMANDS)
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("words", ["--help", "train digits --help", "train --list", "data --list"])
def test_a_reader_that_leaves_early_is_no_error(words: str) -> None:
    read, write = os.pipe()
    os.close(read)  # as `| head -0` does
    done = subprocess.run(
        [sys.executable, "-m", "bsi", *words.split()], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_work_goes_on_though_nobody_reads_what_is_told_of_it(tmp_path: Path) -> None:
    """And exit codes stay what they are: 0 is for what was done."""
    read, write = os.pipe()
    os.close(read)
    for size, code in (("64", 0), ("-1", 2)):
        words = ["train", "digits", "--steps", "4", "--batch", size, "--every.evaluate", "2", "--out", "run"]
        done = subprocess.run([sys.executable, "-m", "bsi", *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=write)
        assert done.returncode == code
    os.close(write)
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_locale_that_lacks_our_letters_is_told_the_rest(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ([], ["--help"], *([name, "--help"] for name in COMMANDS), ["doctor"]):
        out = io.TextIOWrapper(io.BytesIO(), encoding)  # strict, as stdout is in a locale other than C
        monkeypatch.setattr("sys.stdout", out)
        call(*words)
        told = out.buffer.getvalue().decode(encoding)
        assert len(told) > 100, words
        assert "?" not in told.replace("Fr?chet", ""), words  # what is always told has letters that all have


@pytest.mark.parametrize("words", ["view --help", "sample digits --num many", "smaple"])
@pytest.mark.parametrize("wish", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_a_terminal_gets_no_colors_against_its_wish(words: str, wish: dict[str, str]) -> None:
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "bsi", *words.split()]
    subprocess.run(command, stdin=end, stdout=end, stderr=end, env={**os.environ, **wish})
    told = os.read(terminal, 1 << 16)
    os.close(end)
    os.close(terminal)
    assert b"bsi " in told
    assert b"\x1b" not in told


def test_a_file_name_that_is_no_text_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr("sys.stdout", out)
    assert call("export", "digits", "--out", os.fsdecode(b"caf\xe9.safetensors")) == 0
    assert out.buffer.getvalue() == b"caf\xe9.safetensors\n"


@pytest.mark.slow
def test_a_service_without_outputs_is_served(elsewhere: Path) -> None:
    asked = "sample digits --num 2 --steps 2 --out s.png --json"
    for closed in (">&-", ">&- 2>&-"):
        done = subprocess.run(f"{sys.executable} -m bsi {asked} {closed}", shell=True, capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    done = subprocess.run(f"{sys.executable} -m bsi {asked} 2>&-", shell=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["files"] == ["s.png"]  # what is meant for stderr is not on stdout


# ---- What to do next -----------------------------------------------------------------------------------------------


def test_a_folder_of_images_leads_from_command_to_command(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command says which one comes next, with a name that a shell would otherwise take apart."""
    from PIL import Image

    photos = elsewhere / "my photos" / "2026"
    photos.mkdir(parents=True)
    for i in range(40):
        Image.new("RGB", (70 + i, 80), (i, 2 * i, 3 * i)).save(photos / f"{i}.png")
    assert call("data", "folder", "--from", "my photos", "--size", "8") == 0
    assert "bsi train folder --data.name 'my photos', or folder-mini on a CPU" in capsys.readouterr().err
    assert call("data", "folder", "--from", "my photos", "--size", "64", "--to", "large") == 0
    assert re.search(r"bsi train folder --backbone dit-s/4 --data.name \S*large, or", capsys.readouterr().err)
    words = ["train", "folder-mini", "--data.name", "my photos", "--device", "cpu", "--out", "runs/my run"]
    assert call(*words, "--steps", "2", "--every.evaluate", "1") == 0
    out, err = capsys.readouterr()
    assert out == "runs/my run\n"
    assert "parameters on my photos: " in err
    assert "samples of 3 x 8 x 8" in err
    assert re.search(r"step 1: test .*bits/dim", err)
    assert "bsi eval 'runs/my run' --bpd" in err
    assert call("train", "folder", "--data.name", "photos") == 3
    assert "--data.name NAME trains on another: 'digits', 'my photos'" in capsys.readouterr().err


def test_a_few_arrays_lead_to_an_array_of_samples(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    np.save("few.npy", np.random.default_rng(0).normal(size=(64, 3)))
    assert call("data", "arrays", "--from", "few.npy", "--test-fraction", "0.001") == 0
    err = capsys.readouterr().err
    assert "warning: there are no test samples" in err
    assert "bsi train arrays --data.name few, or table-mini on a CPU" in err
    assert call("train", "arrays", "--data.name", "few", "--device", "cpu", "--steps", "1", "--batch", "64") == 0
    assert "bsi sample runs/arrays --npz samples.npz" in capsys.readouterr().err


def test_a_network_too_large_for_a_cpu_is_cautioned_about(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begins(*args: object, begin: Callable[[], None], **kwargs: object) -> None:
        begin()
        pytest.fail("here training would begin")

    monkeypatch.setattr("bsi.training.train.train", begins)
    with pytest.raises(pytest.fail.Exception, match="would begin"):
        call("train", "digits", "--device", "cpu", "--backbone", "dit-l/2")
    err = capsys.readouterr().err
    assert re.search(r"take about [\d,]+ hours on this CPU. `bsi train folder-mini`", err)
    with pytest.raises(pytest.fail.Exception, match="would begin"):
        call("train", "folder-mini", "--data.name", "digits", "--batch", "65536", "--device", "cpu")
    err = capsys.readouterr().err
    assert "hours on this CPU. Use a smaller --backbone, --batch and --steps." in err
    assert "is made for images" not in err, "what was asked for is no advice"
    with pytest.raises(pytest.fail.Exception, match="would begin"):
        call("train", "digits", "--device", "cpu")
    assert "warning" not in capsys.readouterr().err
    with pytest.raises(pytest.fail.Exception, match="would begin"):
        call("train", "arrays", "--data.name", "digits", "--device", "cpu")
    assert "warning: an MLP treats images as vectors. Use `bsi train folder`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "words", "extra"),
    [
        ("fastapi", "view digits", "view"),
        ("torch.utils.tensorboard", "train digits --track tensorboard --steps 1 --device cpu", "tensorboard"),
        ("huggingface_hub", "export digits --hub-folder hub --upload user/name", "hub"),
        ("datasets", "data huggingface --from mnist", "hub"),
    ],
)
def test_a_missing_extra_is_one_message_with_the_command_that_installs_it(
    package: str, words: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("bsi.app")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert call(*words.split()) == 2
    assert f"Run: pip install 'bsi[{extra}]'" in capsys.readouterr().err
