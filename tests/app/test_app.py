"""The server of the page, through real sockets: it streams what the package computes and rejects the rest early."""

import base64
import errno
import http.client
import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bsi import BFN, BSI, VDM, Bins, Model, train
from bsi.app import server
from bsi.app.server import create_app, listen, server_of
from bsi.app.workbench import Frame, Limits, Request, Workbench, open_workbench
from bsi.backbones import MLPConfig
from bsi.conditioning import start_of
from bsi.data.images import Folder
from bsi.data.prepare import prepare
from bsi.data.store import open_dataset
from bsi.errors import NonFinite, UsageError
from bsi.recipe import Data, Optimizer, Recipe, Samples
from bsi.sampler import Sampler
from bsi.sampling import evaluations

TOKEN = "a-token-for-tests"
BLANK = Frame(0, 1, 1.0, *np.zeros((2, 1, 1, 8, 8), np.float32), None)
DRAW: dict[str, Any] = {"kind": "draw", "seed": 3, "num": 2, "evaluations": 5, "solver": "sde2", "grid": "geometric"}


@contextmanager
def serving(bench: Any, jobs: int = 3) -> Iterator[int]:
    """The port of a server in another thread."""
    with listen(0) as listener:
        served = server_of(create_app(bench, TOKEN, jobs))
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        served.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def labeled_bench(folder: Path, steps: int = 150, test_fraction: float = 0.1) -> Workbench:
    """A tiny network, trained for a few steps on dark cats and bright dogs."""
    for kind, gray in (("cat", 40), ("dog", 220)):
        (folder / "pets" / kind).mkdir(parents=True)
        for i in range(16):
            Image.new("L", (8, 8), gray + i).save(folder / "pets" / kind / f"{i}.png")
    pets = Folder(folder / "pets", labels=True, size=8, channels=1, test_fraction=test_fraction)
    prepare(pets.plan(), folder / "data")
    recipe = Recipe(
        name="pets",
        method=BSI(),
        backbone=MLPConfig(width=16, depth=1),
        data=Data(str(folder / "data"), labels=True, unlabeled=0.3),
        steps=steps,
        batch=16,
        optimizer=Optimizer(lr=1e-2),
        virtual_shards=4,
        samples=Samples(4, Sampler(steps=9, solver="sde2")),
        threads=1,
    )
    return open_workbench(train(recipe, out=folder / "run").path, "pets", torch.device("cpu"))


@pytest.fixture(scope="module")
def port(bench: Workbench) -> Iterator[int]:
    with serving(bench) as found:
        yield found


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def error(self) -> str:
        return json.loads(self.body)["error"]


def request(
    port: int, path: str, method: str = "GET", body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} | (headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()})
    finally:
        connection.close()


def ask(port: int, **changes: Any) -> Answer:
    return request(port, f"/{TOKEN}/run", "POST", json.dumps(DRAW | changes).encode())


def decoded(text: str, num: int = 2) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(num, 1, 8, 8)


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array)).decode()


BLACK = encoded(np.zeros(64, "<f4"))


# ---- The stream ------------------------------------------------------------------------------------------------------


def test_the_stream_equals_the_trajectory_of_the_package(bench, port):
    answer = ask(port)
    assert answer.status == 200
    ours = list(bench.model.trajectory(range(2), Sampler(4, "sde2", "geometric"), seed=3))
    assert [line["step"] for line in answer.lines] == list(range(5))
    for line, step in zip(answer.lines, ours, strict=True):
        assert line["last"] == 4
        assert line["precision"] == float(step.level)
        np.testing.assert_array_equal(decoded(line["mean"]), step.latent.numpy())
        np.testing.assert_allclose(decoded(line["x_hat"]), step.x_hat.numpy(), atol=1e-6)
    lines = ask(port, evaluations=9, solver="posterior").lines
    assert lines[0]["y"] is None
    for before, after in itertools.pairwise(lines):  # Lemma "Posterior Update"
        alpha = after["precision"] - before["precision"]
        updated = before["precision"] * decoded(before["mean"]) + alpha * decoded(after["y"])
        np.testing.assert_allclose(updated / after["precision"], decoded(after["mean"]), rtol=1e-3, atol=1e-4)


def test_denoising_starts_at_the_measurement(bench, port):
    image, precision = bench.images[0], 4.0
    lines = ask(port, kind="denoise", image=encoded(image), precision=precision, seed=0).lines
    y, method = decoded(lines[0]["y"]), bench.model.method
    np.testing.assert_array_equal(y[0], y[1])  # one measurement, of which each image is a draw
    assert abs(np.std(y[0] - image) * precision**0.5 - 1) < 4 / np.sqrt(2 * 64)
    assert lines[0]["precision"] == pytest.approx(start_of(method, precision))
    signal = float(method.encoder(torch.tensor([lines[0]["precision"]])).signal)
    np.testing.assert_allclose(decoded(lines[0]["mean"]), signal * y, rtol=1e-5)
    assert np.abs(decoded(lines[-1]["x_hat"]) - image).mean() < np.abs(y - image).mean()


def test_inpainting_keeps_what_is_known(bench, port):
    image, hidden = bench.images[1], np.zeros((8, 8), np.uint8)
    hidden[4:] = 1
    lines = ask(port, kind="inpaint", image=encoded(image), hidden=encoded(hidden), num=2).lines
    drawn = decoded(lines[-1]["x_hat"])
    np.testing.assert_array_equal(drawn[:, :, :4], np.broadcast_to(image, (2, 1, 8, 8))[:, :, :4])
    assert np.abs(drawn[0, :, 4:] - drawn[1, :, 4:]).max() > 0.1  # two images finish it differently


def test_class_and_guidance_reach_the_sampler(labeled):
    bench = labeled
    assert bench.about["classes"] == ("cat", "dog")
    assert (bench.about["solver"], bench.about["evaluations"]) == ("sde2", 10), "as during training"
    image, hidden = np.zeros((1, 8, 8), np.float32), np.ones((8, 8), np.uint8)
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"kind": "denoise", "image": encoded(image), "precision": 1.0},
        {"kind": "inpaint", "image": encoded(image), "hidden": encoded(hidden)},
    )
    with serving(bench) as port:
        assert request(port, f"/{TOKEN}/about").lines[0]["classes"] == ["cat", "dog"]
        for label, guidance in ((0, 1.0), (1, 1.0), (1, 2.5)):
            sampler = Sampler(4, "sde2", "geometric", guidance=guidance)
            ours = list(bench.model.trajectory(range(2), sampler, seed=3, cond=torch.full((2,), label)))
            drawn = decoded(ask(port, label=label, guidance=guidance).lines[-1]["x_hat"])
            np.testing.assert_allclose(drawn, ours[-1].x_hat.numpy(), atol=1e-5)
        for kind in kinds:
            dark, free, bright, brighter = (
                float(decoded(ask(port, **kind, **requested).lines[-1]["x_hat"]).mean())
                for requested in ({"label": 0}, {}, {"label": 1}, {"label": 1, "guidance": 2.5})
            )
            assert dark < bright < brighter, kind
            assert len({dark, free, bright}) == 3
        for wrong, why in (
            ({"label": 2}, "no label 2: its labels are 0 to 1"),
            ({"label": -1}, "no label -1"),
            ({"guidance": 2.0}, "needs a condition to follow, such as a label"),
        ):
            answer = ask(port, **wrong)
            assert answer.status == 422
            assert why in answer.error


@pytest.mark.parametrize("method", [BSI(), BFN(), VDM()], ids=lambda m: type(m).__name__)
def test_every_method_shows_beliefs(bench, method):
    k = 6
    request = Request(**DRAW | {"solver": "posterior", "evaluations": k + evaluations(method, 0)})
    frames = list(bench_of(0.1, method, bench).frames(request))
    assert len(frames) == k + 1
    assert all(np.isfinite(frame.mean).all() for frame in frames)
    precisions = [frame.precision for frame in frames]
    assert precisions == sorted(precisions)
    # The last belief is nearly certain, so its mean is the sample. The values of the first one are not clipped.
    np.testing.assert_allclose(frames[-1].mean, frames[-1].x_hat, atol=0.01)
    assert method.c == 0 or np.abs(frames[0].mean).max() > 5


class Squashing(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.scale * torch.tanh(x)


def bench_of(scale: float, method: Any, bench: Workbench) -> Workbench:
    """Another model for the same images."""
    return replace(bench, model=Model(Squashing(scale), method, (1, 8, 8), Bins(-1.0, 1.0, 17)))


def test_nonfinite_predictions_raise_in_place_of_a_picture(bench):
    with serving(bench_of(float("nan"), BSI(), bench)) as port:
        for requested in ({}, {"kind": "denoise", "image": encoded(bench.images[0]), "precision": 4.0}):
            lines = ask(port, **requested).lines
            assert "NaN" in lines[-1]["error"]
            assert len(lines) == 1


def test_offered_images_are_a_random_subset_of_the_test_set(bench, port):
    """Class folders are stored in order: the first images would all be of one class."""
    assert json.loads(request(port, f"/{TOKEN}/images").body)["count"] == len(bench.images) == 96
    test = bench.model.values(torch.from_numpy(open_dataset("digits").test)).numpy()
    found = [int(np.flatnonzero((test == image).all((1, 2, 3)))[0]) for image in bench.images]
    assert len(set(found)) == 96
    assert min(found) < 30
    assert max(found) > 270


def test_the_test_set_is_found_by_its_content(tmp_path, monkeypatch):
    assert len(labeled_bench(tmp_path, steps=1, test_fraction=0.4).images)
    (tmp_path / "root").mkdir()
    (tmp_path / "data").rename(tmp_path / "root" / "renamed")
    assert not len(open_workbench(tmp_path / "run", "pets", torch.device("cpu")).images)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "root"))
    assert len(open_workbench(tmp_path / "run", "pets", torch.device("cpu")).images)


# ---- Rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num": 10**6}, "1 to 64"),
        ({"num": 2.5}, "num"),
        ({"label": 0}, "without labels"),
        ({"label": "cat"}, "label"),
        ({"guidance": 11}, "guidance"),
        ({"guidance": -1}, "guidance"),
        ({"evaluations": 10**9}, "2 to 128"),
        ({"seed": 2**60}, "seed"),
        ({"solver": "sde3"}, "did you mean 'sde2'"),
        ({"grid": "x" * 100}, "grid"),
        ({"kind": "train"}, "kind"),
        ({"more": 1}, "more"),
        ({"kind": "denoise", "image": "", "precision": 1.0}, "256 bytes"),
        ({"kind": "denoise", "image": "&&&", "precision": 1.0}, "base64"),
        ({"kind": "denoise", "image": encoded(np.full(64, np.nan, "<f4")), "precision": 1.0}, "finite"),
        ({"kind": "denoise", "image": BLACK, "precision": -1.0}, "precision"),
        ({"kind": "denoise", "image": BLACK, "precision": 1e12}, "range"),
        ({"kind": "denoise", "image": BLACK, "precision": 4.0, "solver": "ode2"}, "posterior or"),
        ({"kind": "denoise", "image": BLACK, "precision": 1e-300}, "infinity"),
        ({"kind": "inpaint", "image": BLACK, "hidden": encoded(np.zeros(3, "u1"))}, "64 bytes"),
    ],
)
def test_invalid_requests_are_rejected_before_any_work(port, changes, expected):
    answer = ask(port, **changes)
    assert answer.status == 422
    assert expected in answer.error


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 256, 256)], ids=str)
def test_a_body_that_is_no_json_or_deeply_nested_is_rejected(bench, shape):
    most = Limits.of(shape).body
    assert [Limits.of(s).num for s in ((1, 8, 8), (3, 32, 32), (3, 256, 256))] == [64, 21, 1]
    bodies = [b"", b"{", b"[1]", b"\xff\xfe", b"[" * most, b'{"a":' * (most // 5), b'{"seed":' + b"9" * 2000 + b"}"]
    bodies += [b"[" * 400 + b"]" * 400, b'{"kind": "draw", "seed": 1e999}', b'{"kind": "draw", "guidance": NaN}']
    with serving(replace(bench, limits=Limits.of(shape))) as port:
        for body in bodies:
            answer = request(port, f"/{TOKEN}/run", "POST", body)
            assert answer.status in (400, 422), body[:20]
            assert isinstance(answer.error, str)


def test_large_bodies_are_rejected_without_reading_them(port):
    most = Limits.of((1, 8, 8)).body
    assert request(port, f"/{TOKEN}/run", "POST", b" " * (most + 1)).status == 413
    claimed = [f"Content-Length: {10**12}\r\n\r\n".encode()]  # without the bytes: rejected at once
    chunked = [b"Transfer-Encoding: chunked\r\n\r\n", *[b"3e8\r\n" + b" " * 1000 + b"\r\n"] * (most // 1000 + 2)]
    for pieces in (claimed, chunked):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(f"POST /{TOKEN}/run HTTP/1.1\r\nHost: localhost\r\n".encode())
            for piece in pieces:
                connection.sendall(piece)
            assert connection.recv(64).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "/about", "/main.js", f"/{TOKEN}", f"/{TOKEN[:-1]}/about", f"/{TOKEN}x/about",
        f"/{TOKEN}/../../../../etc/passwd", f"/{TOKEN}/..%2f..%2fpyproject.toml", f"/{TOKEN}/%2e%2e/%2e%2e/etc/passwd",
        f"/{TOKEN}/page/main.js", f"/{TOKEN}//main.js", f"/{TOKEN}/../server.py", f"/{TOKEN}/docs",
        f"/{TOKEN}/openapi.json", f"/{TOKEN}/index.html%00.js", "/static/../" + TOKEN + "/about",
    ],
)  # fmt: skip
def test_other_paths_are_not_found(port, path):
    answer = request(port, path)
    assert 400 <= request(port, f"/{TOKEN}/run", "BREW").status < 500
    assert 400 <= answer.status < 500
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_other_origins_and_hosts_are_rejected(port, headers, status):
    assert request(port, f"/{TOKEN}/about", headers=headers).status == status
    assert request(port, f"/{TOKEN}/run", "POST", json.dumps(DRAW).encode(), headers).status == status


def test_only_this_machine_can_connect(monkeypatch):
    with listen(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        with pytest.raises(UsageError, match="already in use"):
            listen(listener.getsockname()[1])

    def not_permitted(address: tuple[str, int]) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied (while attempting to bind)")

    monkeypatch.setattr(socket, "create_server", not_permitted)
    with pytest.raises(UsageError, match=r"port 80: Permission denied\. Choose another --port"):
        listen(80)


def test_the_page_loads_nothing_from_other_hosts(port):
    answer = request(port, f"/{TOKEN}/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "server" not in answer.headers
    linked = set(re.findall(rb'(?:src|href)="([^"]+)"', answer.body))
    assert linked == {b"data:,", b"page.css", b"main.js"}
    for name in ("page.css", "main.js", "history.js", "sheets.js", "pixel.js", "easel.js"):
        found = request(port, f"/{TOKEN}/{name}")
        assert found.status == 200
        assert not re.search(rb"https?://", found.body)


# ---- A few jobs at a time --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endless(Workbench):
    """A workbench with requests that do not end."""

    made: list[None] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def frames(self, request: Request) -> Iterator[Frame]:
        try:
            while True:
                self.made.append(None)
                yield BLANK
        finally:
            self.ended.set()

    @classmethod
    def like(cls, bench: Workbench) -> "Endless":
        return cls(bench.model, bench.about, bench.images, bench.limits)


def leave_early(port: int) -> int:
    """The status of a request whose client leaves after the first line."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", f"/{TOKEN}/run", json.dumps(DRAW), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.fp.readline()
    connection.close()
    return answer.status


def test_work_ends_when_the_client_leaves(bench):
    endless = Endless.like(bench)
    with serving(endless, jobs=1) as port:
        assert leave_early(port) == 200
        assert endless.ended.wait(20)
        end = time.monotonic() + 20
        while leave_early(port) == 429:  # until the request has ended
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_client_that_does_not_read_blocks_no_other(bench):
    endless, body = Endless.like(bench), json.dumps(DRAW).encode()
    with serving(endless, jobs=1) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as sleeper:
        head = f"POST /{TOKEN}/run HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sleeper.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        sleeper.recv(1)
        # nothing is computed ahead of the reader: the number stays constant
        before = -1
        for _ in range(200):
            time.sleep(0.05)
            if len(endless.made) == before:
                break
            before = len(endless.made)
        assert len(endless.made) == before
        assert request(port, f"/{TOKEN}/about").status == 200
        busy = ask(port)
        assert (busy.status, busy.headers["retry-after"]) == (429, "1")


def test_an_error_while_streaming_is_the_last_line(bench):
    class Failing(Workbench):
        def frames(self, request: Request) -> Iterator[Frame]:
            yield BLANK
            raise NonFinite("a step held NaN")

    with serving(Failing(bench.model, bench.about, bench.images, bench.limits), jobs=1) as port:
        for _ in range(3):  # the slot comes back each time
            assert ask(port).lines[-1] == {"error": "a step held NaN"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_fifty_clients_are_served_or_rejected_in_bounded_memory():
    """Against the command itself, in a separate process."""
    command = [sys.executable, "-m", "bsi", "view", "digits", "--no-browser", "--json", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{32})/", url).groups()
            body = json.dumps(DRAW | {"num": 64, "evaluations": 17}).encode()

            def one(_: int) -> int:
                try:
                    return request(int(port), f"/{token}/run", "POST", body).status
                except (ConnectionError, http.client.HTTPException):
                    return 503  # too many connections are answered and closed

            before = memory(process.pid)
            with ThreadPoolExecutor(50) as clients:
                statuses = list(clients.map(one, range(50)))
            assert set(statuses) <= {200, 429, 503}
            assert 200 in statuses
            assert 429 in statuses
            assert memory(process.pid) - before < 256 << 20
            assert one(0) == 200  # and the next one is accepted
        finally:
            process.send_signal(2)
            _, output = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "Traceback" not in output


def memory(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) << 10


# ---- Connections -----------------------------------------------------------------------------------------------------


@contextmanager
def idle(port: int, num: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send nothing, or the beginning of a request."""
    sockets = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(num)]
    try:
        for connection in sockets:
            connection.sendall(sent)
        yield sockets
    finally:
        for connection in sockets:
            connection.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"POST /wrong HTTP/1.1\r\nHost: x\r\n"]
)
def test_idle_connections_do_not_block_others(bench, sent):
    with serving(bench) as port, idle(port, 60, sent), idle(port, 140, sent):
        assert request(port, f"/{TOKEN}/about").status == 200
        assert ask(port).status == 200


def test_headers_and_bodies_must_arrive_in_time(bench, monkeypatch):
    """Also when a byte arrives now and then, and also after a first request or an early rejection."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(server, "BODY_SECONDS", 0.05)
    first = f"GET /{TOKEN}/main.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in ("", "GET /", first, "POST /wrong/run HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"):
        with serving(bench) as port, socket.create_connection(("127.0.0.1", port), timeout=0.05) as connection:
            started = time.monotonic()
            connection.sendall(head.encode())
            while is_open(connection):
                assert time.monotonic() - started < 10, head
    with serving(bench) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(f"POST /{TOKEN}/run HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nab".encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 408")


def is_open(connection: socket.socket) -> bool:
    """Send a byte, and read what has arrived until the other side closes the connection."""
    try:
        connection.sendall(b"x")
        return connection.recv(1 << 16) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False
