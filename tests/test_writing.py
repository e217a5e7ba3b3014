"""Outputs of commands: atomic writes, one message for a failure, and no lost result.

A full disk is simulated by a limit on the size of files (RLIMIT_FSIZE): the same system calls fail, and no privileges
are needed.
"""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bsi import io
from bsi.cli import main
from bsi.denoiser import Denoiser
from bsi.errors import BsiError, UsageError
from bsi.io import atomic, check_writable, make_folder, system_error


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    return tmp_path


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError(), KeyboardInterrupt()])
def test_writing_a_file_is_atomic(elsewhere: Path, error: BaseException) -> None:
    file = elsewhere / "x.txt"
    with atomic(file) as temporary:
        temporary.write_text("old")
    with pytest.raises((BsiError, RuntimeError, KeyboardInterrupt)), atomic(file) as temporary:  # noqa: PT012
        temporary.write_text("ne")
        raise error
    assert file.read_text() == "old"
    with atomic(file) as temporary:
        temporary.write_text("new")
    assert file.read_text() == "new"
    assert os.listdir(elsewhere) == ["x.txt"]


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EFBIG, 1), (errno.EROFS, 2), (errno.EACCES, 2), (errno.EISDIR, 2)],
)
@pytest.mark.parametrize("kind", ["OSError", "SafetensorError"])
def test_a_full_disk_has_exit_code_1_and_other_errors_exit_code_2(number: int, code: int, kind: str) -> None:
    from safetensors import SafetensorError

    reported = os.strerror(number)
    error = (
        OSError(number, reported)
        if kind == "OSError"
        else SafetensorError(f"I/O error: {reported} (os error {number})")
    )
    with pytest.raises(BsiError) as caught, atomic(Path("x.npz"), "--npz"):
        raise error
    assert caught.value.code == code
    again = "Make room and run the same command again, or give" if code == 1 else "Give"
    assert str(caught.value) == f"cannot write x.npz: {reported}. {again} another --npz."
    assert system_error(ValueError("something else")) is None


def test_a_full_disk_is_recognized_in_numpys_error() -> None:
    reported = r"cannot write x\.npy: No space left on device\. Make room"
    with pytest.raises(BsiError, match=reported) as caught, atomic(Path("x.npy"), "--npz"):
        raise OSError("65536 requested and 36736 written")
    assert caught.value.code == 1


def test_checking_an_output_path_leaves_no_files(elsewhere: Path) -> None:
    (elsewhere / "file").touch()
    check_writable(elsewhere / "new.png", "--out")
    make_folder(elsewhere / "a" / "b", "--out")
    assert sorted(os.listdir(elsewhere)) == ["a", "file"]
    with pytest.raises(UsageError, match=r"Not a directory\. Give another --out"):
        make_folder(elsewhere / "file", "--out")
    with pytest.raises(UsageError, match=r"there is no folder .*file\. Make it, or give another --out"):
        check_writable(elsewhere / "file" / "x.png", "--out")
    with pytest.raises(UsageError, match="Is a directory"):
        check_writable(elsewhere / "a", "--out")
    if os.path.isdir("/proc/self"):  # a folder that not even root can write into
        with pytest.raises(UsageError, match=r"cannot write /proc/self/x\.png: "):
            check_writable(Path("/proc/self/x.png"), "--out")


PLACES = [
    ("sample digits --out taken.png", "cannot write taken.png: Is a directory. Give another --out."),
    ("sample digits --npz taken.npz", "cannot write taken.npz: Is a directory. Give another --npz."),
    ("sample digits --animate taken.gif", "cannot write taken.gif: Is a directory. Give another --animate."),
    ("sample digits --npz file/x.npz", "cannot write file/x.npz: there is no folder file."),
    ("eval digits --bpd --per-sample taken.npz", "cannot write taken.npz: Is a directory. Give another --per-sample."),
    ("export digits --out taken.png", "cannot write taken.png: Is a directory. Give another --out."),
    ("export digits --hub-folder file", "cannot write file: Not a directory. Give another --hub-folder."),
    ("study finite-k --out file", "cannot write file: Not a directory. Give another --out."),
    ("study finite-k --publish file/docs", "cannot write file/docs: Not a directory. Give another --publish."),
    ("data arrays --from a.npy --to file/a", "file: Not a directory. Give another --to."),
]


@pytest.mark.parametrize(("words", "reported"), PLACES, ids=[words for words, _ in PLACES])
def test_an_output_that_cannot_be_written_is_rejected_before_the_work(
    words: str, reported: str, elsewhere: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(Denoiser, "forward", never)
    for name in ("taken.png", "taken.npz", "taken.gif"):
        (elsewhere / name).mkdir()
    (elsewhere / "file").touch()
    np.save(elsewhere / "a.npy", np.zeros((20, 3), np.float32))
    before = sorted(os.listdir(elsewhere))
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert reported in err
    assert len(err.splitlines()) == 1
    assert sorted(set(os.listdir(elsewhere)) - {"runs"}) == before


def test_a_bundled_network_is_exported_into_the_current_folder(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "digits"]) == 0
    (file,) = os.listdir(elsewhere)
    assert capsys.readouterr().out.strip() == file
    assert file.endswith(".safetensors")


# ---- A full disk, in a separate process ------------------------------------------------------------------------------

FULL = """
import contextlib, io, json, os, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import bsi
from bsi.backbones.config import MLPConfig
from bsi.cli import main
recipe = replace(bsi.recipes.digits(), backbone=MLPConfig(width=16, depth=1), steps=1, batch=32)
bsi.train(recipe, out="run", device="cpu")
np.save("x.npy", np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32))
resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
there = lambda: sorted(str(path) for path in Path().rglob("*"))
found = {}
for words in sys.argv[1:]:
    before = there()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words.split())
    left = [path for path in there() if path not in before]
    found[words] = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "left": left}
print(json.dumps(found))
"""

FEW = "--num 2 --steps 2 --device cpu"
WRITING = {
    f"sample run --out a.png {FEW}": ["a.png", "another --out"],
    f"sample run --npz a.npz {FEW}": ["a.npz", "another --npz"],
    f"sample run --animate a.gif {FEW}": ["a.gif", "another --animate"],
    "eval run --bpd --limit 8 --device cpu --per-sample a.npz": ["a.npz", "another --per-sample"],
    "report run --device cpu --no-model": ["report.html", "another --out"],
    "export run": ["run/digits-1.safetensors", "another --out"],
    "data arrays --from x.npy --to a": ["a", "another --to"],
    "train digits --out other --steps 1": ["other/run.json", "another place"],
}
# Only the parts that the same command resumes from are left, or a folder.
RESUMED = ("a.npz.parts", ".a.partial", ".a.lock", "run/evaluations", "other")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FULL, *WRITING],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("full"),
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", WRITING)
def test_a_full_disk_is_one_message_and_leaves_no_files(full: dict[str, dict], words: str) -> None:
    """Row 32."""
    found = full[words]
    assert found["code"] == 1
    (reported,) = [line for line in found["err"].splitlines() if "cannot write" in line and "warning" not in line]
    for part in (*WRITING[words], "File too large", "Make room and run the same command again"):
        assert part in reported
    assert not [path for path in found["left"] if not path.startswith(RESUMED)]


def test_the_result_is_printed_when_it_cannot_be_stored(full: dict[str, dict]) -> None:
    """Row 33."""
    found = next(found for words, found in full.items() if words.startswith("eval"))
    assert "bits/dim ±" in found["out"]
    (warning,) = [line for line in found["err"].splitlines() if "warning" in line]
    assert "printed and not stored: cannot write run/evaluations/" in warning
    assert found["left"] == ["run/evaluations"]


def test_files_do_not_reuse_the_descriptor_of_a_closed_stream(tmp_path: Path) -> None:
    """Row 51: what is written to stderr from a signal handler or from C would end up in it."""
    program = "import os; from bsi.cli import main; main(['--version']); os.rename('a', str(os.open('a', os.O_RDONLY)))"
    (tmp_path / "a").touch()
    subprocess.run(["bash", "-c", f'exec {sys.executable} -c "{program}" <&- >&- 2>&-'], cwd=tmp_path, check=True)
    assert int(os.listdir(tmp_path)[0]) > 2


def test_a_failed_write_to_stdout_is_an_error() -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as nowhere:
        done = subprocess.run([sys.executable, "-m", "bsi", "--version"], stdout=nowhere, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "bsi --version: cannot write the output: No space left on device. "
        "Make room and run the same command again, or give another place.\n"
    )


WRITERS = [lambda path: io.write_text(path, "new"), lambda path: _atomically(path, "new")]


@pytest.mark.parametrize("write", WRITERS)
def test_devices_pipes_and_links_are_written_to_and_never_replaced(elsewhere: Path, write) -> None:
    """Row 40."""
    (elsewhere / "target").write_text("old")
    (elsewhere / "link").symlink_to("target")
    os.mkfifo(elsewhere / "pipe")
    write(elsewhere / "link")
    assert (elsewhere / "link").is_symlink()
    assert (elsewhere / "target").read_text() == "new"
    reader = os.open(elsewhere / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(elsewhere / "pipe")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert (elsewhere / "pipe").is_fifo()
    write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    check_writable(Path("/dev/null"), "--out")
    with pytest.raises(OSError, match=r"(?i)directory"):
        io.write_text(elsewhere, "new")
    assert sorted(os.listdir(elsewhere)) == ["link", "pipe", "target"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_link_planted_in_place_of_the_temporary_file_is_not_written_through(elsewhere: Path, write) -> None:
    """A folder from elsewhere can hold one for every process number."""
    (elsewhere / "victim").write_text("old")
    (elsewhere / f".report.{os.getpid()}.html").symlink_to("victim")
    write(elsewhere / "report.html")
    assert (elsewhere / "victim").read_text() == "old"
    assert (elsewhere / "report.html").read_text() == "new"
    assert sorted(os.listdir(elsewhere)) == ["report.html", "victim"]


def _atomically(path: Path, text: str) -> None:
    with atomic(path) as temporary:
        temporary.write_text(text)
