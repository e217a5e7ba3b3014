"""Random damage: for every input a command ends in time with a documented exit code and one message.

A case is a command line, a damaged run folder, model or data file, made from a seed and its number. It fails on a
traceback, an undocumented exit code, an unexpected error, more than a minute, or a change outside the folder that the
command was given. `make fuzz` runs thousands of cases with a new seed, and prints how many ended with which exit code.
A failing case is repeated by its number:

    BSI_FUZZ_SEED=1 BSI_FUZZ_ONLY=123 python -m pytest -m slow tests/fuzz -k run_folders
"""

import contextlib
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import struct
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import bsi
import bsi.io
from bsi.backbones import MLPConfig
from bsi.cli import main
from bsi.recipe import Every

pytestmark = pytest.mark.slow

CASES = int(os.environ.get("BSI_FUZZ_CASES", "360")) // 4
SEED = int(os.environ.get("BSI_FUZZ_SEED", "0"))
ONLY = os.environ.get("BSI_FUZZ_ONLY")
CODES = (0, 1, 2, 3, 4, 5, 75)
SECONDS = 60
MEMORY = 16 << 30  # more than the process has
DEEP = b"[" * 100_000
SECRET = "../../../outside/secret"  # from a file of the run folder

NUMBERS = ["0", "-1", "1", "2", str(10**40), "-" + "9" * 30, str(2**63), "1" * 5000, "1e999", "-1e999", "nan", "1e-320",
           "0x10", "1_000", "٣", "", " ", "1.5", "true"]  # fmt: skip
WORDS = ["", " ", "x", "-", "--", "---", "None", "~", "~nobody/x", "a" * 300, "a/" * 3000, "%s%n", "{x}", "\n",
         "\x1b[2J", "\udcff", "é", "$HOME", "digits", "https://x", "/dev/null", "/dev/full", "\u202e"]  # fmt: skip
PATHS = ["folder", "pipe", "empty", "binary", "loop", "missing/x", "text", "deep.json", "/proc/self/x"]
NUMBER_OPTIONS = """--num --steps --seed --batch-size --guidance --limit --measure --recon --finite-k --target-se --step
    --sigma-rel --port --size --batch --repeats --skip --channels --length --test-fraction --minutes --seeds
    --optimizer.lr --ema.beta --backbone.width --every.sample --virtual-shards --accumulation --keep.last --hang-after-s
    --method.lambda-0 --method.alpha-M"""
WORD_OPTIONS = """--solver --grid --noise --label --precision --device --split --proposal --reference --data --data.name
    --method --backbone --name --allow --column --revision --upload --scale --nonsense --completion
    --tyro-print-completion"""
PATH_OPTIONS = """--out --npz --animate --per-sample --inception --weights --init-from --hub-folder --from --to
    --publish"""
FLAGS = """--labels --json --bpd --fid --paired --kid --no-model --verify --list --plan --help --version
    --dry-run --lean --audit"""
ON_A_RUN = [
    "sample {} --num 2 --steps 2 --device cpu",
    "sample {} --num 2 --steps 2 --device cpu --npz new.npz",
    "sample {} --num 2 --steps 2 --device cpu --animate new.gif",
    "eval {} --bpd --limit 4 --measure 2 --recon 2 --device cpu",
    "export {} --out new.safetensors",
    "export {}",
    "export {} --hub-folder hub",
    "report {} --no-model",
    "report {} --device cpu",
    "view {} --device cpu --no-browser",
    "train digits --device cpu --out {} --backbone mlp-8x1 --steps 3 --batch 16 --every.evaluate 0",
    "train digits --device cpu --out other --steps 1 --backbone mlp-8x1 --batch 16 --init-from {}",
    "distill {} --steps 1 --batch 16 --device cpu --out other",
    "audit {} --limit 4 --steps 2 --device cpu",
    "sample {} --num 2 --steps 2 --variance level --device cpu",
    "compress {} indices.npy --steps 2 --no-bound --device cpu --out new.bsi",
    "decompress x.bsi {} --device cpu --out new.npy",
]
ON_A_MODEL = [  # a folder of `save_pretrained`, or an exported file
    "sample {} --num 2 --steps 2 --device cpu",
    "eval {} --bpd --limit 4 --measure 2 --recon 2 --data digits --device cpu",
    "export {}",
    "export {} --hub-folder hub",
    "view {} --device cpu --no-browser",
    "compress {} indices.npy --steps 2 --variance none --no-bound --device cpu --out new.bsi",
    "decompress x.bsi {} --device cpu --out new.npy",
    "distill {} --steps 1 --batch 16 --device cpu --out other",
    "train digits --device cpu --out other --steps 1 --backbone mlp-8x1 --batch 16 --init-from {}",
]
ON_DATA = [
    "data arrays --from {}",
    "data arrays --from {} --bins 0 1 4",
    "data arrays --from {} --symbols 4",
    "data text --from {} --length 8",
    "data text --from {} --length 8 --vocabulary bytes",
    "data binary --from {}",
    "data mnist --from {}",
    "data folder --from {} --size 4",
    "data folder --from {} --size 4 --labels --skip 1",
    "data wav --from {} --length 16",
    "data cifar10 --from {}",
    "data imagenet32 --from {}",
    "data x --verify",
    "data --list --verify",
    "fid {} {}",
    "train arrays --data.name x --device cpu --steps 1 --batch 16 --out other",
]
COMMANDS = [
    *(words.replace("{}", "run") for words in ON_A_RUN),
    *(words.replace("{}", "x.npy") for words in ON_DATA),
    *(words.replace("{}", "model") for words in ON_A_MODEL),
    "train digits --dry-run",
    "bench elbo --backbone mlp-8x1 --batch 1 --size 2 --repeats 1 --device cpu",
    "study",
    "study finite-k --plan",
    "doctor",
    "data digits",
]


LIMITS = {"study": ["--plan"], "train": ["--dry-run"], "demo": ["--steps", "1"]}  # commands that take minutes


class Hang(BaseException):
    """Not an Exception, so that no command can handle it."""


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, a dataset and files of every kind."""
    root = tmp_path_factory.mktemp("origin")
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("BSI_DATA", str(root / "data"))
        every = Every(evaluate=0, sample=1, checkpoint=1)
        recipe = replace(bsi.recipes.digits(), backbone=MLPConfig(8, 1), steps=2, batch=16, every=every)
        bsi.train(recipe, out=root / "run", device="cpu")
        bsi.load(root / "run").save_pretrained(root / "model")
        np.save("x.npy", rng.normal(size=(64, 2)))
        np.save("indices.npy", bsi.data.open_dataset("digits").test[:24])
        np.savez("x.npz", arr_0=rng.integers(0, 4, (64, 2), dtype=np.uint8))
        for words in (ON_A_RUN[3].replace("{}", "run"), "data arrays --from x.npy", ON_A_RUN[-2].replace("{}", "run")):
            assert quiet(words.split())[1] == ""
        (root / "new.bsi").rename(root / "x.bsi")
    for i in range(4):
        (root / "images" / f"class{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (5, 5), (i, 2 * i, 3 * i)).save(root / "images" / f"class{i % 2}" / f"{i}.png")
    for kind in ("zip", "gztar"):
        shutil.make_archive(str(root / "images"), kind, root / "images")
    (root / "x.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    (root / "mnist").mkdir()
    for part, count in (("train", 20), ("t10k", 10)):
        for what, shape in (("images-idx3", (count, 6, 6)), ("labels-idx1", (count,))):
            header = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape)
            content = header + rng.integers(0, 10, shape, dtype=np.uint8).tobytes()
            (root / "mnist" / f"{part}-{what}-ubyte").write_bytes(content)
    with wave.open(str(root / "x.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(400))
    (root / "folder").mkdir()
    for name, content in {"empty": b"", "binary": bytes(range(256)) * 40, "text": b"hello", "deep.json": DEEP}.items():
        (root / name).write_bytes(content)
    return root


@pytest.fixture
def here(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, no network, no server, and a limit on memory."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr("bsi.app.server.server_of", lambda app: Served())
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_AS, before)


class Served:
    def run(self, sockets: object) -> None:
        """A server that stops at once."""


def quiet(words: list[str]) -> tuple[int | None, str]:
    """Run a command, and return its exit code and what is wrong with how it ended."""
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")

    def hang(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
            out.flush()
    except Hang:
        return None, f"more than {SECONDS} s"
    except BaseException as error:
        return None, f"raised {error!r}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    text = err.buffer.getvalue().decode()
    if code not in CODES or "Traceback" in text or "unexpected error" in text:
        return code, f"exit code {code}: {text}"
    silent = code and not text.strip() and not out.buffer.getvalue() and "--help" not in words
    return code, f"exit code {code} without a message" if silent else ""


def snapshot(root: Path, working: Path) -> set[tuple[Path, bytes]]:
    """Everything below `root` with its content, except the folder that the command works in."""
    outside = [path for path in root.rglob("*") if not path.is_relative_to(working)]
    return {(path, path.read_bytes() if path.is_file() else b"") for path in outside}


def prepared(origin: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of everything."""
    working = here / "home" / "working"
    shutil.rmtree(here / "home", ignore_errors=True)
    shutil.copytree(origin, working)
    os.mkfifo(working / "pipe")
    (working / "loop").symlink_to("loop")
    (here / "home" / "outside").mkdir()
    (here / "home" / "outside" / "secret").write_text("secret")
    monkeypatch.chdir(working)
    monkeypatch.setenv("BSI_DATA", str(working / "data"))
    return working


@pytest.fixture
def run_cases(origin: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., None]:
    """Run the cases of a seed: `case_of` damages files of a fresh copy, and returns a command and a description."""

    def run(name: str, case_of: Callable[[random.Random, Path], tuple[list[str], str]]) -> None:
        failures, codes = [], Counter[int | None]()
        for case in [int(ONLY)] if ONLY else range(CASES):
            rng, working = random.Random(f"{name} {SEED} {case}"), prepared(origin, here, monkeypatch)
            words, what = case_of(rng, working)
            before = snapshot(here, working)
            code, problem = quiet(words)
            codes[code] += 1
            if changed := snapshot(here, working) ^ before:
                problem = f"{problem}; wrote outside: {sorted(changed)}"
            if problem:
                failures.append(f"case {case}: bsi {' '.join(words)!r} {what}: {problem}")
        with capsys.disabled():
            ends = ", ".join(f"{count} with exit code {code}" for code, count in sorted(codes.items(), key=str))
            print(f"\n{name}, seed {SEED}: {codes.total()} cases, {ends}; {len(failures)} failed")
        assert not failures, "\n".join(failures)

    return run


def test_command_lines(run_cases):
    def case_of(rng: random.Random, working: Path) -> tuple[list[str], str]:
        words = rng.choice(COMMANDS).split()
        for _ in range(rng.randint(1, 3)):
            words = mutated(words, rng)
        return words + LIMITS.get(words[0], []), ""

    run_cases("command", case_of)


def test_damaged_run_folders(run_cases):
    def case_of(rng: random.Random, working: Path) -> tuple[list[str], str]:
        what = [damaged(rng, working / "run") for _ in range(rng.randint(1, 2))]
        return rng.choice(ON_A_RUN).replace("{}", "run").split(), f"after {', '.join(what)}"

    run_cases("run", case_of)


def test_damaged_models(run_cases):
    """A folder of `save_pretrained`, an exported file and a compressed file."""

    def case_of(rng: random.Random, working: Path) -> tuple[list[str], str]:
        source = rng.choice(["model", "model/model.safetensors", "x.bsi"])
        what = damaged(rng, working / source)
        fitting = [words for words in ON_A_MODEL if ("x.bsi" in words) >= (source == "x.bsi")]
        words = rng.choice(fitting).replace("{}", "run" if source == "x.bsi" else source)
        return words.split(), f"after {what}"

    run_cases("model", case_of)


def test_damaged_data(run_cases):
    kinds = {
        "x.npy": "arrays --from", "x.npz": "arrays --from", "images": "folder", "images.zip": "folder",
        "images.tar.gz": "folder", "x.wav": "wav", "x.txt": "text", "mnist": "mnist", "data/x": " x ",
    }  # fmt: skip

    def case_of(rng: random.Random, working: Path) -> tuple[list[str], str]:
        source = rng.choice(list(kinds))
        what = damaged(rng, working / source)
        if source != "data/x":
            shutil.rmtree(working / "data")
        fitting = [words for words in ON_DATA if kinds[source] in words]
        words = rng.choice(fitting if rng.random() < 0.8 else ON_DATA).replace("{}", source).split()
        return words, f"after {what}"

    run_cases("data", case_of)


def mutated(words: list[str], rng: random.Random) -> list[str]:
    """The words with one option added or changed, or a word dropped or replaced."""
    at = rng.randrange(len(words))
    match rng.choice(["number", "number", "word", "path", "path", "flag", "drop", "replace"]):
        case "drop":
            return words[:at] + words[at + 1 :] or words
        case "replace":
            return [*words[:at], rng.choice(WORDS + PATHS + NUMBERS), *words[at + 1 :]]
        case "flag":
            return [*words, rng.choice(FLAGS.split())]
        case "number":
            options, values = NUMBER_OPTIONS.split(), NUMBERS
        case "word":
            options, values = WORD_OPTIONS.split(), WORDS
        case _:
            options, values = PATH_OPTIONS.split(), PATHS + WORDS
    given = [at for at, word in enumerate(words[:-1]) if word in options]
    if given and rng.random() < 0.5:
        at = rng.choice(given)
        return [*words[: at + 1], rng.choice(values), *words[at + 2 :]]
    return [*words, rng.choice(options), rng.choice(values)]


# ---- Damage ----------------------------------------------------------------------------------------------------------


def damaged(rng: random.Random, root: Path) -> str:
    """Damage one file of a folder, or the file itself, and describe how."""
    files = [path for path in root.rglob("*") if path.is_file() and path.parent.is_dir()] if root.is_dir() else [root]
    path = rng.choice(files) if files else root / "new"
    raw = path.read_bytes() if path.is_file() else b""
    contents = {
        "truncated": lambda: raw[: rng.randrange(len(raw) + 1)],
        "flipped": lambda: flipped(raw or b"x", rng),
        "emptied": lambda: b"",
        "extended": lambda: raw + raw[:1000] + b"x",
        "edited": lambda: edited(raw, rng),
        "header": lambda: new_header(raw or b"x", rng),
    }
    targets = {"a loop": path.name, "a device": "/dev/null", "an endless device": "/dev/zero", "a file outside": SECRET}
    ways = ["truncated", "flipped", "emptied", "extended", "removed", *rng.sample(["a folder", "a pipe", *targets], 2)]
    ways += ["edited"] * 4 if path.suffix in (".json", ".jsonl") else []
    ways += ["header"] * 3 if path.suffix in (".safetensors", ".npy", ".npz", ".zip", ".bsi") else []
    way = rng.choice(ways)
    if way in contents:
        path.write_bytes(contents[way]())
        fitting = rng.random() < 0.7
        if fitting:
            fit_hashes(path)
        return f"{path.name} {way}{', with fitting hashes' * fitting}"
    path.unlink(missing_ok=True)
    if way == "a folder":
        path.mkdir()
    elif way == "a pipe":
        os.mkfifo(path)
    elif way in targets:
        path.symlink_to(targets[way])
    return f"{path.name} is {way}"


def fit_hashes(path: Path) -> None:
    """Change the hashes that cover a file, as whoever damages it on purpose would."""
    if path.suffix == ".bsi":
        content = path.read_bytes()[:-32]
        path.write_bytes(content + hashlib.sha256(content).digest())
    manifest = path.parent / "manifest.json"
    if path.parent.name.startswith("step-") and path != manifest:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is damaged itself
            record = json.loads(manifest.read_bytes())
            record["files"][path.name] = {"bytes": path.stat().st_size, "sha256": bsi.io.digest_file(path)}
            content = {"format": record["format"], "files": record["files"]}
            bsi.io.write_json(manifest, {**content, "sha256": bsi.io.fingerprint(content)})


def flipped(raw: bytes, rng: random.Random) -> bytes:
    """A few flipped bits."""
    changed = bytearray(raw)
    for _ in range(rng.choice([1, 1, 3, 30])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def new_header(raw: bytes, rng: random.Random) -> bytes:
    """Other bytes near the beginning."""
    start = rng.randrange(min(200, len(raw)))
    new = rng.choice([b"99999999999", b"-1", b"\xff" * 8, struct.pack("<Q", 2**62), b"{", b"\0" * 8])
    return raw[:start] + new + raw[start + len(new) :]


def edited(raw: bytes, rng: random.Random) -> bytes:
    """JSON with one value replaced by another, or text that is not JSON."""
    line, *rest = raw.split(b"\n") if raw.count(b"\n{") > 1 else [raw]
    bad = rng.choice([
        None, True, 0, -1, 1e308, 10**40, "", "x" * 1000, "../../x", "/outside/x", [], {}, [[]], "\ud800", float("nan"),
    ])  # fmt: skip
    try:
        value = json.loads(line)
    except ValueError:
        return DEEP
    if rng.random() < 0.06:
        return rng.choice([DEEP, b'{"a": "\xff"}'])
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return json.dumps(bad).encode()
    parent, key = value, some_key(value, rng)
    while isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8:
        parent = parent[key]
        key = some_key(parent, rng)
    if isinstance(parent, dict) and rng.random() < 0.3:
        del parent[key]
    else:
        parent[key] = bad
    return b"\n".join([json.dumps(value).encode(), *rest])


def some_key(value: dict | list, rng: random.Random) -> str | int:
    return rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
