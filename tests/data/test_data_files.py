"""Untrusted files: archives, pickles, headers, pipes. Nothing is written outside or unpickled, and nothing blocks."""

import gzip
import hashlib
import io
import os
import pickle
import socket
import stat
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bsi.data import published
from bsi.data.arrays import Arrays
from bsi.data.files import ArrayFile, header_bytes, open_arrays
from bsi.data.prepare import prepare
from bsi.data.published import BATCHES, Cifar10, ImageNet32, ImageNet64
from bsi.errors import DataError, UsageError
from bsi.io import data_folder, download, parse_json, read_json
from inputs import save_imagenet

RECORDS = 20


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Small files in CIFAR-10's format, which the code takes for the official ones."""
    rng = np.random.default_rng(0)
    made = {name: rng.integers(0, 256, (RECORDS, 3073), dtype=np.uint8).tobytes() for name in published.CIFAR10_FILES}
    monkeypatch.setattr(
        published, "CIFAR10_FILES", {name: hashlib.sha256(raw).hexdigest() for name, raw in made.items()}
    )
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
    """The same files in every supported form."""
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
        assert (len(dataset.train), len(dataset.test), dataset.labels.names[9]) == (5 * RECORDS, RECORDS, "truck")
        assert np.array_equal(dataset.train[2 * RECORDS : 3 * RECORDS].reshape(RECORDS, -1), expected[:, 1:])
        assert np.array_equal(dataset.labels.train[2 * RECORDS : 3 * RECORDS], expected[:, 0])
    assert len(versions) == 1


def test_cifar10_files_are_compared_with_their_hashes(files: dict[str, bytes], tmp_path: Path) -> None:
    folder = layouts(tmp_path, files)["folder"]
    (folder / "test_batch.bin").write_bytes(b"x" + files["test_batch.bin"][1:])
    with pytest.raises(DataError, match=r"test_batch.bin is damaged: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        Cifar10(folder).plan()
    (folder / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"holds no test_batch\.bin"):
        Cifar10(folder).plan()


class Canary:
    """A pickle that creates a file if it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_malicious_cifar_pickle_is_never_loaded(tmp_path: Path) -> None:
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
    for name in published.CIFAR10_FILES:  # also under the names of the binary files
        (folder / name).write_bytes(payload)
    with pytest.raises(DataError, match="is damaged"):
        Cifar10(folder).plan()
    assert not canary.exists()
    pickle.loads(payload)
    assert canary.exists(), "loading this pickle must create the file"


def bad_archives(folder: Path, files: dict[str, bytes]) -> Iterator[tuple[str, Path]]:
    """Archives with the expected files and one more entry, and the error message."""
    named = [(f"c/{name}", raw) for name, raw in files.items()]
    tars = {
        "leads outside": [entry("../outside"), entry("/outside"), entry("c/../../outside"), entry("C:\\outside")],
        "a link or a device": [
            entry("c/link", tarfile.SYMTYPE, "/etc/passwd"),
            entry("c/hard", tarfile.LNKTYPE, "../../outside"),
            *(entry("c/device", kind) for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)),
        ],
    }
    for why, infos in tars.items():
        for number, info in enumerate(infos):
            good = [(entry(name), raw) for name, raw in named]
            yield why, tar_of(folder / f"{why}-{number}.tar.gz", [*good, (info, b"")])
    link = zipfile.ZipInfo("c/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for why, name, more in (
        ("leads outside", "outside.zip", ("../outside", b"x")),
        ("leads outside", "absolute.zip", ("/outside", b"x")),
        ("a link or a device", "link.zip", (link, b"/etc/passwd")),
        ("decompression bomb", "bomb.zip", ("c/zeros.bin", bytes(80 << 20))),
    ):
        yield why, zip_of(folder / name, [*named, more])
    # Headers alone: a file of a terabyte, and an extended header of a gigabyte.
    huge, extended = entry("c/huge.bin"), entry("c/pax", tarfile.XHDTYPE)
    huge.size, extended.size = 1 << 40, 1 << 30
    for why, header in (
        ("unpacks to more than", huge.tobuf()),
        ("extended header", extended.tobuf(tarfile.USTAR_FORMAT)),
    ):
        path = folder / f"{why}.tar.gz"
        path.write_bytes(gzip.compress(header))
        yield why, path


def test_malicious_archives_are_rejected_and_write_nothing_outside(files, tmp_path):
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


def test_damaged_archives_are_rejected(files: dict[str, bytes], tmp_path: Path) -> None:
    complete = layouts(tmp_path, files)["tar.gz"].read_bytes()
    path = tmp_path / "bad.tar.gz"
    for raw in (b"", b"nonsense" * 200, complete[: len(complete) // 2], complete[:40] + b"\xff" * 40 + complete[80:]):
        path.write_bytes(raw)
        with pytest.raises(DataError, match=r"bad\.tar\.gz"):
            Cifar10(path).plan()
    twice = [("a/test_batch.bin", b"1"), ("b/test_batch.bin", b"2")]
    with pytest.raises(DataError, match="twice"):
        Cifar10(zip_of(tmp_path / "twice.zip", twice)).plan()


@pytest.mark.slow
@pytest.mark.skipif(
    not (data_folder() / "cifar-10-batches-bin").is_dir(), reason="the real CIFAR-10 is not in the data folder"
)
def test_the_real_cifar10_has_the_known_version(tmp_path: Path) -> None:
    folder = data_folder() / "cifar-10-batches-bin"
    with tarfile.open(tmp_path / "cifar.tar", "w") as archive:
        archive.add(folder, folder.name)
    for path in (folder, tmp_path / "cifar.tar"):
        dataset = prepare(Cifar10(path).plan(), tmp_path / f"from-{path.name}")
        assert dataset.version == "1bd69bc08ebd3844eb6c65712c3a66e10e01c7717b9c9ada5183fd4969a165a3"
        assert np.bincount(dataset.labels.train).tolist() == [5000] * 10


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_imagenet(tmp_path_factory.mktemp("imagenet") / "batches")


def test_imagenet_is_the_same_from_batches_and_from_their_zips(imagenet: Path, tmp_path: Path) -> None:
    with np.load(imagenet / "train_data_batch_2.npz") as batch:
        images, labels = batch["data"], batch["labels"]
    plan = ImageNet32(imagenet).plan()
    dataset = prepare(plan, tmp_path / "a")
    assert (plan.name, dataset.shape) == ("imagenet32", (3, 32, 32))
    assert (len(dataset.train), len(dataset.test)) == (sum(range(3, 13)), 13)
    assert np.array_equal(dataset.train[3:7].reshape(4, -1), images)
    assert np.array_equal(dataset.labels.train[3:7], labels - 1)
    zips = tmp_path / "zips"
    zips.mkdir()
    for name, wanted in (("Imagenet32_train_npz.zip", BATCHES[:-1]), ("Imagenet32_val_npz.zip", BATCHES[-1:])):
        with zipfile.ZipFile(zips / name, "w", zipfile.ZIP_DEFLATED) as archive:
            for batch_name in wanted:
                archive.write(imagenet / batch_name, f"Imagenet32/{batch_name}")
    assert prepare(ImageNet32(zips).plan(), tmp_path / "b").version == dataset.version


def test_imagenet_of_another_size_or_format_is_rejected(imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected \(N, 12288\) of uint8"):
        ImageNet64(imagenet).plan()
    (tmp_path / "train_data_batch_1").write_bytes(b"pickle")
    with pytest.raises(DataError, match=r"made of pickles, which are never loaded"):
        ImageNet32(tmp_path).plan()
    for name in BATCHES:
        np.savez(tmp_path / name, data=np.zeros((2, 3072), np.uint8), labels=np.zeros(2, int))
    with pytest.raises(DataError, match="row 0 is 0, expected labels from 1 to 1000"):
        prepare(ImageNet32(tmp_path).plan(), tmp_path / "out")


# ---- NumPy's files ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "<u2", ">i4", "<f4", ">f8", "?", "<f2"]),
    start=st.integers(0, 5),
    block=st.integers(1, 300),
)
def test_streamed_rows_are_those_of_numpy(shape: list[int], dtype: str, start: int, block: int) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    stream = io.BytesIO()
    np.save(stream, array)
    stream.seek(0)
    start = min(start, len(array))
    with ArrayFile(stream, len(stream.getvalue()), "x") as file:
        assert np.array_equal(np.concatenate([array[:0], *file.blocks(start, block)]), array[start:])


def test_object_arrays_and_terabyte_headers_are_rejected_before_memory_is_allocated(tmp_path):
    canary = tmp_path / "canary"
    objects = np.array([Canary(canary)], object)
    np.savez(tmp_path / "objects.npz", train=objects)
    floats, magic = np.dtype("<f4"), b"\x93NUMPY"
    terabyte = header_bytes(floats, (1 << 28, 1 << 10))
    zip_of(tmp_path / "terabyte.npz", [("train.npy", terabyte)])
    zip_of(tmp_path / "bomb.npz", [("train.npy", header_bytes(np.dtype("u1"), (80 << 20,)) + bytes(80 << 20))])
    cases: dict[str, tuple[np.ndarray | bytes | None, str]] = {
        "objects.npz": (None, "Python objects"),
        "terabyte.npz": (None, "claims .* but holds 256 bytes"),
        "bomb.npz": (None, "decompression bomb"),
        "objects.npy": (objects, "Python objects"),
        "named.npy": (np.zeros(3, [("a", "f4"), ("b", "O")]), "Python objects"),
        "fortran.npy": (np.asfortranarray(np.zeros((3, 4))), "ascontiguousarray"),
        "scalar.npy": (np.array(3.0), "first axis counts"),
        "complex.npy": (np.zeros(3, complex), "integers or real floats"),
        "pickle.npy": (pickle.dumps(Canary(canary)), "not a valid .npy file"),
        "short.npy": (b"\x93NU", "not a valid .npy file"),
        "future.npy": (magic + b"\x09\x00", "format version"),
        "long.npy": (magic + b"\x02\x00\xff\xff\xff\xff" + b" " * 100, "format version"),
        "terabyte.npy": (terabyte, "claims .* but holds 256 bytes"),
        "negative.npy": (header_bytes(floats, (-1, 4)), "holds .-1, 4. of float32"),
        "both.npy": (header_bytes(floats, (-1, -4)) + bytes(16), "holds .-1, -4. of float32"),
        "deep.npy": (magic + b"\x01\x00" + (4000).to_bytes(2, "little") + b"(" * 4000, "not a valid .npy file"),
    }
    for name, (content, why) in cases.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        elif content is not None:
            np.save(tmp_path / name, content, allow_pickle=True)
        tracemalloc.start()
        with pytest.raises(DataError, match=f"{name}.*{why}"):
            Arrays(tmp_path / name).plan()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, f"the peak at {name}"
        tracemalloc.stop()
    assert not canary.exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_an_error_every_time(save, tmp_path, monkeypatch):
    """A bit is flipped in the last of several blocks. A second run does not resume after the blocks that were read."""
    monkeypatch.setattr("bsi.data.prepare.SYNC_EVERY_S", 0.0)
    path = tmp_path / "x.npz"
    train = np.random.default_rng(0).normal(size=(20, 1 << 17)).astype("f4")  # 10 MiB, more than a block
    save(path, train=train)
    raw = bytearray(path.read_bytes())
    good = bytes(raw)
    raw[len(raw) - (1 << 20)] ^= 4
    path.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(DataError, match=r"x\.npz.* damaged"):
            prepare(Arrays(path).plan(), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    path.write_bytes(good)
    found = prepare(Arrays(path, test_fraction=0.0).plan(), tmp_path / "out")
    assert np.array_equal(found.train, train)


def test_rows_of_a_damaged_file_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damage is in the first block and the checksum at the end: after a repair, all rows are read again."""
    monkeypatch.setattr("bsi.data.prepare.SYNC_EVERY_S", 0.0)
    images = np.random.default_rng(0).integers(0, 256, (3000, 3072), dtype=np.uint8)  # 9 MiB
    for name in BATCHES:
        rows = images if name == BATCHES[0] else images[:1]
        np.savez(tmp_path / name, data=rows, labels=np.ones(len(rows), int))
    path = tmp_path / BATCHES[0]
    good = path.read_bytes()
    path.write_bytes(good[:100_000] + bytes([good[100_000] ^ 1]) + good[100_001:])
    with pytest.raises(DataError, match="damaged"):
        prepare(ImageNet32(tmp_path).plan(), tmp_path / "out")
    path.write_bytes(good)
    found = prepare(ImageNet32(tmp_path).plan(), tmp_path / "out")
    assert np.array_equal(found.train[:3000].reshape(3000, -1), images)


def test_resuming_does_not_skip_the_checksum_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seek = zipfile.ZipExtFile.seek

    def without_checksum(self: zipfile.ZipExtFile, *where: int) -> int:
        """As of Python 3.12."""
        self._expected_crc = None
        return seek(self, *where)

    monkeypatch.setattr(zipfile.ZipExtFile, "seek", without_checksum)
    path = tmp_path / "x.npz"
    np.savez(path, train=np.zeros((1000, 1000)))
    raw = bytearray(path.read_bytes())
    raw[500_000] ^= 1
    path.write_bytes(raw)
    with open_arrays(path) as arrays, arrays["train"]() as array, pytest.raises(DataError, match="damaged"):
        list(array.blocks(900))


def test_an_archive_with_an_unknown_method_or_a_truncated_array_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, train=np.zeros((100, 10)))
    raw = path.read_bytes()
    for offset, kind in ((8, b"PK\x03\x04"), (10, b"PK\x01\x02")):  # the method, in both headers of the member
        at = raw.index(kind) + offset
        raw = raw[:at] + b"\x63\x00" + raw[at + 2 :]
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"x\.npz"):
        Arrays(path).plan()
    np.save(tmp_path / "x.npy", np.zeros((100, 1000)))
    with ArrayFile.at(tmp_path / "x.npy") as array:
        os.truncate(tmp_path / "x.npy", 100_000)
        with pytest.raises(DataError, match="truncated"):
            list(array.blocks(0, 8000))


# ---- Other objects where a file is expected --------------------------------------------------------------------------


def not_files(folder: Path) -> dict[str, Path]:
    os.mkfifo(folder / "pipe.npy")
    (folder / "folder.npy").mkdir()
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "socket.npy"))
    server.close()
    (folder / "device.npy").symlink_to("/dev/zero")
    (folder / "loop.npy").symlink_to("loop.npy")
    names = ("pipe.npy", "folder.npy", "socket.npy", "device.npy", "loop.npy", "absent.npy", f"{'x' * 300}.npy")
    return {name: folder / name for name in (*names, "null\0.npy", os.fsdecode(b"utf\xff.npy"))}


@pytest.mark.parametrize("source", [Arrays, Cifar10, ImageNet32])
def test_untrusted_inputs_must_be_regular_files(source: type, tmp_path: Path) -> None:
    for name, path in not_files(tmp_path).items():
        if name == "folder.npy" and source is not Arrays:
            continue
        with pytest.raises(DataError):
            source(path).plan()


def test_untrusted_json_is_limited_in_size_and_depth(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, 2]}')
    assert read_json(path) == {"a": [1, 2]}
    with pytest.raises(DataError, match="at most 5"):
        read_json(path, limit=5)
    for text in (b"[" * 100_000, b"[" * 200 + b"]" * 200, b'{"a":' * 100 + b"1" + b"}" * 100):
        with pytest.raises(DataError, match="nested"):
            parse_json(text, "x")
    for text in (b"", b"{", b"\xff\xfe", b"1" * 10_000):
        with pytest.raises(DataError, match="x is not valid JSON"):
            parse_json(text, "x")


# ---- Downloads -------------------------------------------------------------------------------------------------------
class Server(BaseHTTPRequestHandler):
    """Serves `content`, with ranges; breaks off after `limit` bytes."""

    content = bytes(range(256)) * 4000
    limit: int | None = None
    ranges: bool = True
    requested: list[str | None]

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        type(self).requested.append(requested)
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested and self.ranges else 0
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
    handler = type("Handler", (Server,), {"requested": []})
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield handler, f"http://127.0.0.1:{http.server_port}/file"
        http.shutdown()
        thread.join()


def test_a_download_resumes_and_has_its_hash(server: tuple[type[Server], str], tmp_path: Path) -> None:
    handler, url = server
    sha, path = hashlib.sha256(handler.content).hexdigest(), tmp_path / "x"
    handler.limit = 300_000
    with pytest.raises(DataError, match="again"):
        download(url, path, sha, "give it")
    assert not path.exists()
    handler.limit = None
    for _ in range(2):  # the second call finds the file
        assert download(url, path, sha, "give it").read_bytes() == handler.content
    assert handler.requested == [None, "bytes=300000-"]
    path.unlink()
    handler.ranges = False  # a server without support for ranges
    (tmp_path / "x.part").write_bytes(b"old")
    assert download(url, path, sha, "give it").read_bytes() == handler.content
    path.unlink()
    with pytest.raises(DataError, match=f"expected sha256 {'0' * 64}, found {sha}"):
        download(url, path, "0" * 64, "give it")
    assert list(tmp_path.iterdir()) == []


def test_being_offline_is_one_message_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give it with --from"):
        download("http://127.0.0.1:9/file", tmp_path / "x", "0" * 64, "give it with --from")
