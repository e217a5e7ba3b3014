"""`bsi report`: one file with the contents of the run folder, which opens offline and runs no code."""

import base64
import html
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import bsi
from bsi.backbones.config import DiTConfig, MLPConfig
from bsi.cli import main
from bsi.data.arrays import Text
from bsi.data.prepare import prepare
from bsi.errors import BsiError, UsageError
from bsi.recipe import Data, Evaluation, Every, Samples
from bsi.report import write_report
from bsi.report.charts import Axis, Point, Series, chart, label, log_ticks, nice_ticks
from bsi.report.contents import bits_by_level
from bsi.runtime.export import export
from bsi.sampler import Sampler
from bsi.training.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run of the digits recipe with all files of a run."""
    named = bsi.recipes.digits()
    recipe = replace(
        named,
        backbone=DiTConfig(width=8, depth=1, heads=2, patch=4),
        steps=6,
        every=Every(journal=1, evaluate=3, sample=3, checkpoint=6),
        evaluation=Evaluation(images=8, measure=2, recon=2),
        samples=Samples(4, Sampler(steps=2)),
    )
    return train(recipe, out=tmp_path_factory.mktemp("runs") / "tiny", device="cpu", named=named).path


@pytest.fixture(scope="module")
def report(run):
    return write_report(run, device="cpu").read_text("utf-8")


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run whose files may be changed."""
    folder = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("report.html"))
    (folder / "evaluations").mkdir(exist_ok=True)
    return folder


class Reader(HTMLParser):
    """Checks that every tag that opens is closed, and collects the references of a document."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "circle", "polyline", "polygon"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.references = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def runs_nothing(self):
        return "script" not in self.tags and all(reference.startswith("data:") for reference in self.references)


def files_only(folder):
    """The report of a run without its model."""
    text = write_report(folder, folder / "r.html", ask_model=False).read_text("utf-8")
    Reader(text)
    return text


def numbers(report):
    """The numbers of its tables by name."""
    rows = re.findall(r"<tr><th>(?:<b>)?([^<]+)(?:</b>)?</th><td>(?:<b>)?([-\d.]+)(?:</b>)?</td></tr>", report)
    return {name: float(value) for name, value in rows}


def test_report_is_one_file_that_opens_offline(report):
    reader = Reader(report)
    assert reader.runs_nothing()
    assert reader.references
    assert not re.search(r"https?://|url\(|@import", report)


def test_report_shows_the_recipe_the_curves_the_samples_and_the_hashes(report, run):
    manifest = json.loads((run / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    titles = ("Loss", "Learning rate", "Samples per second", "Norm of the gradient", "Where the bits are")
    for text in (
        "Differs from <b>digits</b> in:", "<code>backbone.width</code>", "64 -&gt; 8", "<code>optimizer.lr</code>",
        "BSI on digits", "finished", "step 3</figcaption>", "step 6</figcaption>", torch.__version__,
        *(record["sha256"] for record in manifest["files"].values()),
    ):  # fmt: skip
        assert text in report
    assert all(f"<title>{title}" in report or f"<b>{title}</b>" in report for title in titles)
    assert report.count("data:image/png") == 2
    (animation,) = re.findall(r"data:image/webp;base64,([^\"]+)", report)
    assert Image.open(io.BytesIO(base64.b64decode(animation))).n_frames == 33


def test_report_gives_the_terms_of_the_bound_with_their_errors(report, run):
    rows = numbers(report)
    assert rows["bits per dimension"] == pytest.approx(
        sum(rows[name] for name in ("reconstruction", "measurement", "prior")), abs=2e-4
    )
    assert rows["± Monte Carlo"] > 0
    assert "for 299 test samples" in report
    journal = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    trained = next(record for record in reversed(journal) if record["event"] == "evaluate")
    # the trainer evaluated 8 images, the report 299: the same model, roughly the same value
    assert rows["bits per dimension"] == pytest.approx(trained["bits_per_dim"], rel=0.25)


def test_the_area_under_the_bits_is_the_measurement_term():
    """Of a network that predicts 0: |x - x_hat|^2 is then known, and so is the integral."""

    class Zero(torch.nn.Module):
        def forward(self, x, t):
            return torch.zeros_like(x)

    model = bsi.Model(Zero(), bsi.BSI(alpha_M=100.0), (1, 8, 8), bsi.Bins(-1.0, 1.0, 17))
    data = torch.randint(0, 17, (64, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    points = bits_by_level(model, data)
    decades = math.log10(model.method.levels.high / model.method.levels.low)
    area = sum(point.y for point in points) * decades / len(points)
    bound = model.elbo(data, measure=40, recon=2)
    expected = float(bound.measurement.mean()) / (bound.n * math.log(2))
    assert area == pytest.approx(expected, abs=4 * (bound.monte_carlo_error + max(p.error for p in points)))
    assert all(point.error > 0 for point in points)


def test_a_run_without_its_model_still_has_a_report(copy):
    shutil.rmtree(copy / "checkpoints")
    text = write_report(copy).read_text()
    Reader(text)
    assert "Left out" in text
    assert "Learning rate" in text
    assert "image/webp" not in files_only(copy)


def test_a_run_with_a_custom_network_is_evaluated_when_it_is_passed(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x, t):
            return self.layer(x)

    recipe = replace(bsi.recipes.digits(), method=bsi.BSI(), steps=2, every=Every(journal=1, checkpoint=2))
    images = torch.randint(0, 256, (128, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    folder = bsi.train(recipe, images, Net(), tmp_path / "own", device="cpu").path
    assert "was not loaded" in write_report(folder, device="cpu").read_text()
    text = write_report(folder, backbone=Net(), device="cpu").read_text()
    Reader(text)
    assert "image/webp" in text
    assert "no bound: the test set" in text  # the recipe's dataset is not what this run was trained on


def test_distances_are_drawn_by_solver_and_guidance_with_their_errors(copy):
    for i, (solver, classes, guidance, count, value) in enumerate((
        ("ode2", 0, 1.0, 16, 50.6), ("ode2", 10, 1.0, 16, 12.5), ("ode2", 10, 1.4, 32, 10.5), ("sde2", 0, 1.0, 16, 9.5),
    )):  # fmt: skip
        record = {"metric": "FID", "value": value, "error": 0.125, "n": 10_000,
                  "drawing": {"guidance": guidance, "classes": classes, "label": None},
                  "generation": {"solver": solver, "evaluations": count, "seed": 0}}  # fmt: skip
        (copy / "evaluations" / f"{i}.json").write_text(json.dumps(record))
    (copy / "evaluations" / "broken.json").write_text("{")
    text = files_only(copy)
    names = ("ode2: 50.6", "ode2, guidance 1: 12.5", "ode2, guidance 1.4: 10.5", "sde2: 9.5")
    for words in ("FID against evaluations", *names, "<td>0.125</td>", "<td>1.4</td>"):
        assert words in text


def test_the_report_prefers_the_bound_of_bsi_eval(copy):
    assert main(["eval", str(copy), "--bpd", "--limit", "8", "--device", "cpu"]) == 0
    (stored,) = (copy / "evaluations").glob("*.json")
    bits = json.loads(stored.read_text())["bits_per_dim"]
    text = files_only(copy)
    assert f"<dt>bits per dimension</dt><dd>{bits:.3f}" in text
    assert "By <code>bsi eval</code>: 8 test samples, at step 6." in text


def test_outdated_bounds_are_replaced_and_limits_are_marked(copy):
    record = {"bits_per_dim": 9.8765, "data_error": 0.25, "data_resolved": False, "split": "test", "step": 3}
    (copy / "evaluations" / "a.json").write_text(json.dumps(record))
    assert "<b>9.8765</b>" not in write_report(copy, device="cpu").read_text("utf-8")  # the run is at step 6
    shown = files_only(copy)  # nothing newer is known
    assert "<b>9.8765</b>" in shown
    assert "at most 0.2500" in shown


@pytest.fixture(scope="module")
def continuous(tmp_path_factory):
    """A run on vectors of floats, whose units are not those that the network sees, with an evaluation."""
    recipe = replace(
        bsi.recipes.arrays(),
        backbone=MLPConfig(width=8, depth=1),
        steps=2,
        batch=64,
        every=Every(journal=1, evaluate=1, sample=0, checkpoint=2),
        evaluation=Evaluation(images=8, measure=2, recon=2),
    )
    data = 5 + 20 * torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    out = tmp_path_factory.mktemp("runs") / "vectors"
    return bsi.train(recipe, data=data, test=data[:8], out=out, device="cpu").path


@pytest.mark.parametrize("written", ["journal", "by bsi eval"])
def test_all_of_continuous_data_is_in_nats_and_the_terms_add_up(continuous, tmp_path, written):
    copy = shutil.copytree(continuous, tmp_path / "copy")
    found = [json.loads(s) for s in (copy / "journal.jsonl").read_text().splitlines() if '"evaluate"' in s][-1]
    assert found["change_of_units"] == pytest.approx(math.log2(20), abs=0.3)
    nats = {name: math.log(2) * found[name] for name in ("bits_per_dim", "measurement", "monte_carlo_error")}
    if written != "journal":
        kept = ("reconstruction", "measurement", "prior", "bits_per_dim", "step", "binned", "monte_carlo_error")
        record = {name: found[name] for name in kept} | {"split": "test", "images": 8}
        (copy / "evaluations").mkdir()
        for i in (1, 2):
            (copy / "evaluations" / f"{i}-bpd-test.json").write_text(json.dumps(record))
    text = files_only(copy)
    rows = numbers(text)
    assert rows["change of units"] == pytest.approx(math.log(2) * found["change_of_units"], abs=1e-4)
    terms = [rows[name] for name in ("reconstruction", "measurement", "prior", "change of units")]
    assert rows["nats per dimension"] == pytest.approx(sum(terms), abs=3e-4)
    assert rows["nats per dimension"] == pytest.approx(found["nats_per_dim"], abs=1e-4)
    assert rows["in bits per dimension"] == pytest.approx(found["bits_per_dim"], abs=1e-4)
    assert f"<dt>nats per dimension</dt><dd>{nats['bits_per_dim']:.3f}" in text
    assert f"± {nats['monte_carlo_error']:.3f} (Monte Carlo)" in text
    assert f"test, by the EMA: {nats['measurement']:.5g}" in text  # the curve
    assert "measurement term, nats per dimension" in text
    assert text.count("bits per dimension") == 1
    if written != "journal":
        assert f"<td>{nats['monte_carlo_error']:.5g}</td>" in text, "the table of all evaluations"


def test_training_and_test_are_compared_on_the_same_term(copy):
    """The bound of continuous data includes the density of the decoder and a change of units; the loss does not."""
    records = [json.loads(line) for line in (copy / "journal.jsonl").read_text().splitlines()]
    changed = {"bits_per_dim": -3.0, "measurement": 4.125}
    lines = [json.dumps(record | changed if record["event"] == "evaluate" else record) for record in records]
    (copy / "journal.jsonl").write_text("\n".join(lines) + "\n")
    assert "test, by the EMA: 4.125" in files_only(copy)


def test_a_folder_that_is_no_run_is_rejected(tmp_path, run):
    with pytest.raises(UsageError, match="it has no run"):
        write_report(tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        write_report(run, tmp_path / "nowhere" / "r.html")


# Damaged and malicious files

DAMAGE = {
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "cut": b'{"files": {',
    "bytes": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "files": b'{"files": [1], "state": 3, "step": [2], "data": 4, "event": "train"}',
    "entries": b'{"files": {"a": 1, "b": {"bytes": "x"}, "c": {}}, "state": [], "step": 1e999, "bits_per_dim": NaN}',
    "wrong types": b'{"metric": [], "value": "x", "generation": [], "drawing": 3, "bits_per_dim": {}, "step": "x"}',
    "huge": b'{"step": ' + b"9" * 4000 + b', "event": "train", "lr": ' + b"9" * 4000 + b', "bits_per_dim": 1e308}',
    "negative": b'{"step": -1, "event": "train", "lr": -1e20, "bits_per_dim": -1e20}',
}
FILES = ("status.json", "journal.jsonl", "evaluations/1.json", "checkpoints/latest")
FILES += tuple(f"checkpoints/step-00000006/{name}.json" for name in ("manifest", "state"))


@pytest.mark.parametrize("damage", [*DAMAGE, "folder", "pipe", "loop"])
def test_damaged_files_are_left_out_of_a_report(copy, damage):
    for name in FILES:
        path, kept = copy / name, copy / f"{name}.kept"
        if path.exists():
            path.rename(kept)
        if damage == "folder":
            path.mkdir()
        elif damage == "pipe":
            os.mkfifo(path)
        elif damage == "loop":
            path.symlink_to(path.name)
        else:
            path.write_bytes(DAMAGE[damage])
        files_only(copy)
        path.rmdir() if damage == "folder" else path.unlink()
        if kept.exists():
            kept.rename(path)


@pytest.mark.parametrize("damage", ["list", "files", "entries", "deep", "folder"])
def test_a_report_names_the_model_that_could_not_be_loaded(copy, damage):
    manifest = copy / "checkpoints" / "step-00000006" / "manifest.json"
    manifest.unlink()
    manifest.mkdir() if damage == "folder" else manifest.write_bytes(DAMAGE[damage])
    text = write_report(copy, copy / "r.html", device="cpu").read_text()
    Reader(text)
    assert "the model was not loaded" in text


def test_damage_of_run_json_is_an_error_or_left_out(copy):
    about = json.loads((copy / "run.json").read_text())
    for key in ("changed", "command", "environment"):
        for value in (3, None, [[1]], {"a": {"b": [None]}}, "x"):
            (copy / "run.json").write_text(json.dumps(about | {key: value}))
            files_only(copy)
    for content in DAMAGE.values():
        (copy / "run.json").write_bytes(content)
        with pytest.raises(BsiError):
            write_report(copy, ask_model=False)


def test_text_of_files_is_escaped(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "<img src=x>", ignore=shutil.ignore_patterns("checkpoints"))
    evil = "<script>alert(1)</script>"
    about = json.loads((copy / "run.json").read_text())
    about["recipe"]["data"]["name"] = evil
    about["changed"] = [f"{evil}: {evil} -> {evil}"]
    about["command"] = [evil]
    about["environment"][evil] = evil
    (copy / "run.json").write_text(json.dumps(about))
    (copy / "status.json").write_text(json.dumps({"state": f'"{evil}', "step": 6}))
    (copy / "evaluations").mkdir()
    (copy / "evaluations" / "a.json").write_text(json.dumps({"bits_per_dim": 1.0, evil: evil}))
    assert Reader(write_report(copy, tmp_path / "r.html").read_text()).runs_nothing()


def test_files_outside_the_run_are_not_embedded(copy, tmp_path):
    secret = base64.b64encode(b"the secret").decode()
    picture = io.BytesIO()
    Image.new("L", (2, 2)).save(picture, "png", pnginfo=None)
    outside = tmp_path / "outside"
    (outside / "evaluations").mkdir(parents=True)
    (outside / "grid.png").write_bytes(picture.getvalue() + b"the secret" * 3)
    (outside / "evaluations" / "x.json").write_text(json.dumps({"metric": secret, "value": 1.0, "n": secret}))
    (outside / "journal.jsonl").write_text(json.dumps({"step": 1, "event": "evaluate", "bits_per_dim": 1.2345678}))
    grids = sorted((copy / "samples").glob("*.png"))
    grids[0].unlink()
    grids[0].symlink_to(outside / "grid.png")  # to a picture, and to any other file
    grids[1].unlink()
    grids[1].write_bytes(b"the secret" * 30)  # not a picture
    shutil.rmtree(copy / "evaluations")
    (copy / "evaluations").symlink_to(outside / "evaluations")
    text = files_only(copy)
    assert "data:image/png" not in text
    assert secret not in text
    (copy / "journal.jsonl").unlink()
    (copy / "journal.jsonl").symlink_to(outside / "journal.jsonl")
    assert "1.235" not in files_only(copy)


def test_nothing_is_written_through_links_that_lead_out_of_a_run(copy, tmp_path, capsys):
    """Row 57: by a report, an export or training; an evaluation is printed with a warning."""
    outside, exported = tmp_path / "outside", export(copy)
    outside.mkdir()
    exported.unlink()
    for link in ("report.html", exported.name, "lock.json", "checkpoints/latest.txt"):
        (copy / link).symlink_to(outside / "file")
    shutil.rmtree(copy / "evaluations")
    (copy / "evaluations").symlink_to(outside)
    for write in (write_report, export, lambda run: bsi.train(bsi.recipes.digits(), out=run, device="cpu")):
        with pytest.raises(UsageError, match="outside of the run folder"):
            write(copy)
    assert main(["eval", str(copy), "--bpd", "--limit", "2", "--device", "cpu"]) == 0
    assert "warning" in capsys.readouterr().err
    assert not list(outside.iterdir())
    write_report(copy, outside / "report.html", ask_model=False)  # the user may choose any folder


# Charts


def test_ticks_are_round_numbers_and_labels_are_short():
    assert nice_ticks(0.0, 10.0) == pytest.approx([0, 2, 4, 6, 8, 10])
    assert nice_ticks(0.0, 0.002) == pytest.approx([0, 0.0005, 0.001, 0.0015, 0.002])
    assert nice_ticks(-1.0, 1.0) == pytest.approx([-1, -0.5, 0, 0.5, 1])
    values = (0.0, 1.0, 0.001, 2000.0, 1e6, 3e-5, -0.5)
    assert [label(value) for value in values] == ["0", "1", "0.001", "2,000", "10⁶", "3·10⁻⁵", "-0.5"]


@pytest.mark.parametrize(("low", "high"), [(2.1, 5.6), (0.9, 1.3), (30.0, 90.0), (1.0, 3.0), (0.02, 40.0)])
def test_a_logarithmic_axis_has_enough_ticks(low, high):
    ticks = log_ticks(low, high)
    assert len(ticks) > 2
    assert low <= ticks[0] < ticks[-1] <= high


def polyline(points, x=Axis("x"), y=Axis("y")):  # noqa: B008
    (line,) = re.findall(r'<polyline [^>]*points="([^"]+)"', chart("c", x, y, [Series("s", points)]))
    return np.array([[float(v) for v in pair.split(",")] for pair in line.split()])


def test_a_chart_places_values_correctly():
    (x0, y0), (x1, y1), (x2, y2) = polyline([Point(0.0, 0.0), Point(1.0, 5.0), Point(2.0, 10.0)])
    assert (x1, y1) == pytest.approx(((x0 + x2) / 2, (y0 + y2) / 2), abs=0.1)
    assert y0 > y2  # upwards
    x = polyline([Point(1.0, 0.0), Point(10.0, 1.0), Point(100.0, 2.0)], Axis("x", log=True))[:, 0]
    assert x[1] == pytest.approx((x[0] + x[2]) / 2, abs=0.1)


def test_a_chart_omits_nonfinite_values():
    points = [Point(0.0, math.nan), Point(1.0, 2.0), Point(2.0, math.inf), Point(3.0, 4.0)]
    assert len(polyline(points)) == 2
    assert chart("c", Axis("x"), Axis("y", log=True), [Series("s", [Point(1.0, -1.0)])]) == ""
    assert len(polyline([Point(float(i), math.sin(i)) for i in range(10_001)])) <= 600
    for value in (5.0, 1e20, -1e20):  # a range of no width
        point = [Point(value, value)]
        assert "<circle" in chart("c", Axis("x", low=0.0), Axis("y"), [Series("s", point, dots=True)])


def test_report_shows_text_and_the_most_probable_symbols_as_they_sharpen(tmp_path, monkeypatch):
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    (tmp_path / "story.txt").write_text("<b>to be, or not to be.\n" * 200)
    prepare(Text(tmp_path / "story.txt", length=24).plan(), tmp_path / "data" / "story")
    recipe = replace(
        bsi.recipes.text_mini(), backbone=DiTConfig(width=8, depth=1, heads=2, patch=1), data=Data("story"), steps=2,
        every=Every(journal=1, evaluate=2, sample=2, checkpoint=2), samples=Samples(2, Sampler(steps=2)),
    )  # fmt: skip
    run = train(recipe, out=tmp_path / "run", device="cpu")
    text = write_report(run.path, device="cpu").read_text("utf-8")
    assert Reader(text).runs_nothing()
    steps = re.findall(r'<code class="letters">(.*?)</code>', text)
    assert len(steps) == 7
    assert all(len(html.unescape(re.sub("<[^>]*>", "", step))) == 24 for step in steps)
    drawn = (run.path / "samples" / "step-00000002.txt").read_text("utf-8")
    assert f"<pre>{html.escape(drawn)}</pre>" in text
    area = (
        sum(point.y for point in bits_by_level(run.model(), torch.tensor(bsi.data.open_dataset("story").test[:]))) / 21
    )
    levels = recipe.method.levels
    assert area * math.log10(levels.high / levels.low) == pytest.approx(run.evaluations()[-1]["measurement"], rel=0.1)
