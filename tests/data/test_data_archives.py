"""Archives and downloads: nothing is written outside, nothing unpacks without bound, no pickle is loaded."""

import gzip
import hashlib
import io
import os
import pickle
import stat
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from bsi.data import cifar10
from bsi.data.archives import members
from bsi.data.cifar10 import Cifar10
from bsi.data.prepare import prepare
from bsi.download import download
from bsi.errors import DataError
from bsi.io import data_folder

RECORDS = 20


def fake_cifar() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8).tobytes() for name in cifar10.SHA256}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Small files of CIFAR-10's format, which the code takes for the official ones."""
    made = fake_cifar()
    monkeypatch.setattr(cifar10, "SHA256", {name: hashlib.sha256(raw).hexdigest() for name, raw in made.items()})
    return made


def tar_of(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for info, content in entries:
            if info.isreg() and not info.size:
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def zip_of(path: Path, entries: list[tuple[zipfile.ZipInfo | str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, content in entries:
            archive.writestr(info, content)
    return path


def layouts(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    """The same files in every form in which they may be given."""
    inner = folder / "all" / "cifar-10-batches-bin"
    inner.mkdir(parents=True)
    for name, raw in files.items():
        (inner / name).write_bytes(raw)
    named = [(f"cifar-10-batches-bin/{name}", raw) for name, raw in reversed(files.items())]
    return {
        "folder": inner,
        "parent": inner.parent,
        "tar.gz": tar_of(folder / "c.tar.gz", [(entry(name), raw) for name, raw in named]),
        "tar": tar_of(folder / "c.tar", [(entry(name), raw) for name, raw in named], "w"),
        "zip": zip_of(folder / "c.zip", list(named)),
    }


def test_cifar10_is_the_same_from_a_folder_and_from_any_archive(files: dict[str, bytes], tmp_path: Path) -> None:
    expected = np.frombuffer(files["data_batch_3.bin"], np.uint8).reshape(RECORDS, 3073)
    versions = set()
    for form, path in layouts(tmp_path, files).items():
        dataset = prepare(Cifar10(path).plan(), tmp_path / f"prepared-{form}")
        versions.add(dataset.version)
        assert (len(dataset.train), len(dataset.test)) == (5 * RECORDS, RECORDS)
        assert np.array_equal(dataset.train[2 * RECORDS : 3 * RECORDS].reshape(RECORDS, -1), expected[:, 1:])
        assert np.array_equal(dataset.labels.train[2 * RECORDS : 3 * RECORDS], expected[:, 0])
    assert len(versions) == 1


def test_cifar10_has_the_names_of_its_classes_where_they_came_along(files: dict[str, bytes], tmp_path: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    assert Cifar10(layouts(tmp_path / "without", files)["tar.gz"]).plan().classes == ()
    files["batches.meta.txt"] = ("\n".join(names) + "\n\n").encode()
    for form, path in layouts(tmp_path / "with", files).items():
        assert prepare(Cifar10(path).plan(), tmp_path / form).labels.names == tuple(names)
    files["batches.meta.txt"] = b"airplane automobile"
    with pytest.raises(DataError, match=r"batches\.meta\.txt holds 2 names of classes, expected 10"):
        Cifar10(layouts(tmp_path / "cut", files)["zip"]).plan()


def test_cifar10_blocks_can_begin_anywhere(files: dict[str, bytes], tmp_path: Path) -> None:
    plan = Cifar10(layouts(tmp_path, files)["tar.gz"]).plan()
    whole = np.concatenate([rows for block in plan.blocks(0) for rows in block.rows.values()])
    for start in (1, RECORDS, 3 * RECORDS + 7, 6 * RECORDS - 1):
        rest = np.concatenate([rows for block in plan.blocks(start) for rows in block.rows.values()])
        assert np.array_equal(rest, whole[start:])


def test_a_changed_cifar10_file_is_refused_with_both_hashes(files: dict[str, bytes], tmp_path: Path) -> None:
    folder = layouts(tmp_path, files)["folder"]
    (folder / "test_batch.bin").write_bytes(b"x" + files["test_batch.bin"][1:])
    with pytest.raises(DataError, match=r"test_batch.bin is damaged: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        Cifar10(folder).plan()
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"holds no test_batch\.bin"):
        Cifar10(folder).plan()


class Canary:
    """A pickle that leaves a trace if it is ever loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_row_24_a_malicious_cifar_pickle_is_never_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payload = pickle.dumps(Canary(canary))
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    for name in names:
        (folder / name).write_bytes(payload)
    archive = tar_of(tmp_path / "cifar-10-python.tar.gz", [(entry(f"{folder.name}/{name}"), payload) for name in names])
    for path in (folder, archive):
        with pytest.raises(DataError, match=r"made of pickles, which are never loaded.*binary version"):
            Cifar10(path).plan()
    for name in cifar10.SHA256:  # and not under the binary files' names either
        (folder / name).write_bytes(payload)
    with pytest.raises(DataError, match="is damaged"):
        Cifar10(folder).plan()
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists(), "the canary itself must work"


def bad_archives(folder: Path, files: dict[str, bytes]) -> Iterator[tuple[str, Path]]:
    good = [(entry(f"c/{name}"), raw) for name, raw in files.items()]
    huge = entry("c/huge.bin")
    huge.size = 1 << 40
    extras = {
        "leads outside": [entry("../outside"), entry("/outside"), entry("c/../../outside"), entry("C:\\outside")],
        "a link or a device": [
            entry("c/link", tarfile.SYMTYPE, "/etc/passwd"),
            entry("c/hard", tarfile.LNKTYPE, "../../outside"),
            entry("c/null", tarfile.CHRTYPE),
            entry("c/disk", tarfile.BLKTYPE),
            entry("c/pipe", tarfile.FIFOTYPE),
        ],
    }
    for why, infos in extras.items():
        for number, info in enumerate(infos):
            yield why, tar_of(folder / f"{why}-{number}.tar.gz", [*good, (info, b"")])
    link = zipfile.ZipInfo("c/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    names = [(f"c/{name}", raw) for name, raw in files.items()]
    yield "leads outside", zip_of(folder / "outside.zip", [*names, ("../outside", b"x")])
    yield "leads outside", zip_of(folder / "absolute.zip", [*names, ("/outside", b"x")])
    yield "a link or a device", zip_of(folder / "link.zip", [*names, (link, b"/etc/passwd")])
    # Bombs: a claim of a terabyte, a gigabyte of zeros in a megabyte, and an extended header of a gigabyte.
    with gzip.open(folder / "claim.tar.gz", "wb") as file:
        file.write(huge.tobuf())
    yield "unpacks to more than", folder / "claim.tar.gz"
    yield "decompression bomb", zip_of(folder / "bomb.zip", [*names, ("c/zeros.bin", bytes(80 << 20))])
    header = entry("c/pax", tarfile.XHDTYPE)
    header.size = 1 << 30
    with gzip.open(folder / "header.tar.gz", "wb") as file:
        file.write(header.tobuf(tarfile.USTAR_FORMAT))
    yield "extended header", folder / "header.tar.gz"


def test_row_25_malicious_archives_are_refused_and_nothing_is_written_outside(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    archives = list(bad_archives(inside, files))
    before = sorted(tmp_path.rglob("*"))
    for why, path in archives:
        with pytest.raises(DataError, match=why):
            Cifar10(path).plan()
    assert sorted(tmp_path.rglob("*")) == before
    assert len(archives) == 15
    assert not Path("/outside").exists()


def test_damaged_archives_are_refused_by_name(files: dict[str, bytes], tmp_path: Path) -> None:
    whole = layouts(tmp_path, files)["tar.gz"].read_bytes()
    for number, raw in enumerate(
        [b"", b"nonsense" * 200, whole[: len(whole) // 2], whole[:40] + b"\xff" * 40 + whole[80:]]
    ):
        path = tmp_path / f"bad-{number}.tar.gz"
        path.write_bytes(raw)
        with pytest.raises(DataError, match=f"bad-{number}"):
            Cifar10(path).plan()
    with pytest.raises(DataError, match="does not exist"):
        Cifar10(tmp_path / "nowhere").plan()


def test_a_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = tar_of(tmp_path / "twice.tar", [(entry("a/x.bin"), b"1"), (entry("b/x.bin"), b"2")], "w")
    with pytest.raises(DataError, match="twice"), members(path, ["x.bin"], 1 << 20):
        pass


@pytest.mark.skipif(
    not (data_folder() / "cifar-10-batches-bin").is_dir(), reason="the real CIFAR-10 is not in the data folder"
)
def test_the_real_cifar10_has_the_known_version(tmp_path: Path) -> None:
    dataset = prepare(Cifar10(data_folder() / "cifar-10-batches-bin").plan(), tmp_path / "cifar10")
    assert dataset.version == "1bd69bc08ebd3844eb6c65712c3a66e10e01c7717b9c9ada5183fd4969a165a3"
    assert np.bincount(dataset.labels.train).tolist() == [5000] * 10
    means = dataset.train[:2000].mean((0, 2, 3)) / 255
    assert np.abs(means - [0.4914, 0.4822, 0.4465]).max() < 0.01


class Server(BaseHTTPRequestHandler):
    """Serves `content`, with ranges; breaks off after `limit` bytes."""

    content = bytes(range(256)) * 4000
    limit: int | None = None
    ranges: bool = True
    asked: list[str | None]

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(self.content):
            self.send_error(416)
            return
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.limit])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[type[Server], str]]:
    handler = type("Handler", (Server,), {"asked": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}/file"
        http.shutdown()
        thread.join()


def test_an_interrupted_download_goes_on(server: tuple[type[Server], str], tmp_path: Path) -> None:
    handler, url = server
    sha = hashlib.sha256(handler.content).hexdigest()
    handler.limit = 300_000
    with pytest.raises(DataError, match="again"):
        download(url, tmp_path / "x", sha, "give it")
    assert not (tmp_path / "x").exists()
    handler.limit = None
    assert download(url, tmp_path / "x", sha, "give it").read_bytes() == handler.content
    assert handler.asked == [None, "bytes=300000-"]
    download(url, tmp_path / "x", sha, "give it")
    assert len(handler.asked) == 2
    assert not (tmp_path / "x.part").exists()


def test_a_download_from_a_server_without_ranges_starts_over(server: tuple[type[Server], str], tmp_path: Path) -> None:
    handler, url = server
    handler.ranges = False
    (tmp_path / "x.part").write_bytes(b"old")
    sha = hashlib.sha256(handler.content).hexdigest()
    assert download(url, tmp_path / "x", sha, "give it").read_bytes() == handler.content


def test_a_download_with_another_hash_is_deleted_and_refused(server: tuple[type[Server], str], tmp_path: Path) -> None:
    handler, url = server
    with pytest.raises(
        DataError, match=f"expected sha256 {'0' * 64}, found {hashlib.sha256(handler.content).hexdigest()}"
    ):
        download(url, tmp_path / "x", "0" * 64, "give it")
    assert list(tmp_path.iterdir()) == []


def test_being_offline_is_said_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give it with --from"):
        download("http://127.0.0.1:9/file", tmp_path / "x", "0" * 64, "give it with --from")
