"""Images from folders and the hub, and sound: unusable files are named, others are stored as the manifest describes."""

import io
import os
import re
import struct
import sys
import types
import wave
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from bsi.data.arrays import Wav, write_wav
from bsi.data.files import for_testing, walk
from bsi.data.images import Folder, HuggingFace, open_image, pixels
from bsi.data.prepare import prepare
from bsi.data.store import open_dataset
from bsi.errors import DataError, UsageError
from inputs import noise, save_wav


def read(path: Path, size: int, channels: int) -> np.ndarray:
    return pixels(open_image(path, path.name), path.name, size, channels)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for i in range(60):
        path = folder / ("cats" if i % 3 else "dogs/old") / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(i, 8, 8)).save(path)
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image either")
    return folder


def test_images_that_fit_are_stored_unchanged_in_sorted_order(photos: Path, tmp_path: Path) -> None:
    dataset = prepare(Folder(photos, size=8).plan(), tmp_path / "out")
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("[0-9]*.png"))
    for split, stored in (("train", dataset.train), ("test", dataset.test)):
        mine = [name for name in names if for_testing(name, 0.1) == (split == "test")]
        assert len(mine) == len(stored) > 0
        for name, image in zip(mine, stored, strict=True):
            assert np.array_equal(image, noise(int(Path(name).stem), 8, 8).transpose(2, 0, 1))
    assert dataset.manifest.options["resampling"] == "lanczos"
    assert "largest centered square" in dataset.manifest.source


def test_the_split_of_an_image_does_not_depend_on_the_others(photos: Path, tmp_path: Path) -> None:
    before = prepare(Folder(photos, size=8).plan(), tmp_path / "before")
    assert not for_testing("cats/001.png", 0.1)
    (photos / "cats" / "001.png").unlink()
    after = prepare(Folder(photos, size=8).plan(), tmp_path / "after")
    assert after.manifest.input != before.manifest.input, "a changed folder is another input"
    assert np.array_equal(before.test, after.test)
    chosen = sum(for_testing(f"{i}.png", 0.25) for i in range(4000))
    assert abs(chosen - 1000) < 4 * np.sqrt(4000 * 0.25 * 0.75)


def test_a_wide_image_is_cropped_to_its_center_and_resampled(tmp_path: Path) -> None:
    pixels = np.zeros((4, 12, 3), np.uint8)
    pixels[:, 4:8] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    for name in ("wide.png", "tall.png"):
        assert (read(tmp_path / name, 4, 3) == 200).all()


def test_a_resampled_crop_is_the_crop_of_the_resampled_image(tmp_path: Path) -> None:
    """The filter reads the pixels around the square, as inside of it: its edges are no edges of the image."""
    image = Image.fromarray(noise(0, 40, 64))
    image.save(tmp_path / "wide.png")
    for size in (40, 20, 10):
        whole = np.asarray(image.resize((64 * size // 40, size), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
        left = (whole.shape[2] - size) // 2
        assert np.array_equal(read(tmp_path / "wide.png", size, 3), whole[:, :, left : left + size])


def test_images_of_any_mode_become_color_or_gray_and_upright(tmp_path: Path) -> None:
    gray = noise(0, 8, 8, 1)
    Image.fromarray(gray).save(tmp_path / "gray.png")
    Image.fromarray(np.dstack([gray] * 3 + [np.full_like(gray, 255)])).save(tmp_path / "opaque.png")
    Image.fromarray(gray).convert("P").save(tmp_path / "palette.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.fromarray(np.rot90(gray)).save(tmp_path / "turned.png", exif=exif)
    for name in ("gray.png", "opaque.png", "palette.png", "turned.png"):
        assert np.array_equal(read(tmp_path / name, 8, 3), np.stack([gray] * 3))
        assert np.array_equal(read(tmp_path / name, 8, 1), gray[None])


def deep_png() -> bytes:
    """A color PNG of 16 bits per channel, which Pillow opens as an ordinary RGB image."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(bytes(8 * (1 + 8 * 6))))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def bad_images(folder: Path) -> dict[str, str]:
    """One file of each unusable kind, and the error message."""
    good, *frames = (Image.fromarray(noise(i, 64, 64)) for i in range(3))
    sixteen = Image.fromarray(noise(1, 64, 64, 1).astype(np.uint16) * 257)
    kinds = {
        "truncated.jpg": ("cannot be decoded", encoded(good, "JPEG")[:1000]),
        "empty.png": ("is empty", b""),
        "nonsense.png": ("cannot be decoded", b"nonsense" * 100),
        "deep.png": ("more than eight bits per channel", deep_png()),
        "sixteen.png": ("more than eight bits per channel", encoded(sixteen)),
        "cmyk.jpg": ("CMYK", encoded(good.convert("CMYK"), "JPEG")),
        "animated.gif": ("animated", encoded(good, "GIF", save_all=True, append_images=frames)),
        "huge.png": ("9000 x 9000 pixels", encoded(Image.new("1", (9000, 9000)))),
        "small.png": ("fewer than the size", encoded(Image.new("RGB", (64, 7)))),
        "transparent.png": ("partly transparent.*mogrify", encoded(Image.fromarray(noise(2, 64, 64, 4)))),
    }
    for name, (_, raw) in kinds.items():
        (folder / name).write_bytes(raw)
    return {name: why for name, (why, _) in kinds.items()}


def test_unusable_images_are_named_and_skipped_up_to_a_limit(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    expected = bad_images(folder)
    for name, why in expected.items():
        with pytest.raises(DataError, match=f"^{name} .*{why}"):
            read(folder / name, 32, 3)
    for i in range(20):
        Image.fromarray(noise(i, 32, 32)).save(folder / f"good{i}.png")
    with pytest.raises(DataError, match=r"animated\.gif is animated.*Nothing may be skipped.*--skip N"):
        prepare(Folder(folder, size=32).plan(), tmp_path / "out")
    with pytest.raises(DataError, match=r"Only 9 may be skipped"):
        prepare(Folder(folder, size=32, skip=len(expected) - 1).plan(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    dataset = prepare(Folder(folder, size=32, skip=len(expected)).plan(), tmp_path / "out")
    assert len(dataset.train) + len(dataset.test) == 20
    assert len(dataset.manifest.skipped) == len(expected)
    for name, why in expected.items():
        assert any(re.match(f"{name} .*{why}", line) for line in dataset.manifest.skipped)


def test_folders_are_read_without_hidden_files_and_link_cycles(photos: Path) -> None:
    assert len(set(walk(photos, (".png",)))) == 60
    (photos / "cats" / "circle").symlink_to(photos, target_is_directory=True)
    with pytest.raises(DataError, match="is a link to a folder"):
        list(walk(photos, (".png",)))
    with pytest.raises(DataError, match="is not a folder"):
        list(walk(photos / "nothing", (".png",)))
    for options in ({"size": 0}, {"skip": -1}, {"test_fraction": 1.0}):
        with pytest.raises(UsageError, match=next(iter(options))):
            Folder(photos, **options)


def test_the_folder_below_the_root_is_an_images_class(photos: Path, tmp_path: Path) -> None:
    (photos / "cats" / "000.png").write_text("damaged")
    (photos / "ants").mkdir()  # a folder without images is no class
    prepare(Folder(photos, labels=True, size=8, skip=1).plan(), tmp_path / "out")
    dataset = open_dataset(tmp_path / "out")
    assert (dataset.labels.names, dataset.labels.classes) == (("cats", "dogs"), 2)
    label_of = {noise(i, 8, 8).transpose(2, 0, 1).tobytes(): int(i % 3 == 0) for i in range(60)}
    for images, labels in ((dataset.train, dataset.labels.train), (dataset.test, dataset.labels.test)):
        assert [label_of[image.tobytes()] for image in images] == labels.tolist()
    assert prepare(Folder(photos, size=8, skip=1).plan(), tmp_path / "plain").labels is None
    with pytest.raises(UsageError, match="labels: None there, 'the folder below the root' requested"):
        prepare(Folder(photos, labels=True, size=8, skip=1).plan(), tmp_path / "plain")


def test_classes_without_training_images_are_kept(photos: Path, tmp_path: Path) -> None:
    name = next(f"{i}.png" for i in range(1000) if for_testing(f"owls/{i}.png", 0.1))
    (photos / "owls").mkdir()
    Image.fromarray(noise(0, 8, 8)).save(photos / "owls" / name)
    labels = prepare(Folder(photos, labels=True, size=8).plan(), tmp_path / "out").labels
    assert labels.names == ("cats", "dogs", "owls")
    assert (labels.classes, int(labels.train.max()), int(labels.test.max())) == (3, 1, 2)


def test_folders_without_usable_classes_are_rejected(photos: Path) -> None:
    stray = photos / "stray.png"
    Image.fromarray(noise(0, 8, 8)).save(stray)
    with pytest.raises(DataError, match=r"stray\.png is in no class.*omit --labels"):
        Folder(photos, labels=True).plan()
    stray.unlink()
    with pytest.raises(DataError, match="are in old, which makes one class"):
        Folder(photos / "dogs", labels=True).plan()
    os.rename(photos / "cats", os.fsencode(photos) + b"/c\xff")
    with pytest.raises(DataError, match=r"the name 'c\\udcff', expected printable text"):
        Folder(photos, labels=True).plan()


def test_gray_images_stay_gray_and_the_size_is_that_of_the_images(tmp_path: Path) -> None:
    """Without options: 28 x 28 gray images are stored unchanged, and the choices are recorded."""
    for i in range(30):
        Image.fromarray(noise(i, 28, 28, 1)).save(tmp_path / f"{i}.png")
    dataset = prepare(Folder(tmp_path, test_fraction=0.0).plan(), tmp_path / "out")
    assert (dataset.shape, dataset.train.shape) == ((1, 28, 28), (30, 1, 28, 28))
    assert any(np.array_equal(dataset.train[0, 0], noise(i, 28, 28, 1)) for i in range(30))
    notes = " ".join(open_dataset(tmp_path / "out").manifest.notes)
    assert "28 x 28" in notes
    assert "gray" in notes
    assert prepare(Folder(tmp_path, channels=3).plan(), tmp_path / "color").shape == (3, 28, 28)
    assert Folder(tmp_path, size=28, channels=1).plan().identity == Folder(tmp_path).plan().identity
    Image.fromarray(noise(1, 28, 90)).save(tmp_path / "color.jpg")
    plan = Folder(tmp_path).plan()
    assert plan.shape == (3, 28, 28)
    assert "1 of 31 images are not square" in " ".join(plan.notes)
    for height, size in ((40, 28), (23, 20), (64, 28), (65, 64)):
        Image.fromarray(noise(1, height, 90)).save(tmp_path / "color.jpg")
        assert Folder(tmp_path).plan().shape == (3, size, size), "the smallest of small images, otherwise the default"


def test_the_size_of_odd_images_is_one_that_the_networks_take(tmp_path: Path) -> None:
    for i in range(4):
        Image.fromarray(noise(i, 37, 45)).save(tmp_path / f"{i}.png")
    assert Folder(tmp_path).plan().shape == (3, 36, 36)
    assert Folder(tmp_path, size=37).plan().shape == (3, 37, 37)


def test_sound_is_restored_from_the_indices_of_its_pieces(tmp_path: Path) -> None:
    folder = tmp_path / "sound"
    folder.mkdir()
    sounds = {f"{i}.wav": np.random.default_rng(i).integers(-(2**15), 2**15, (130 * i + 3, 2)) for i in range(12)}
    for name, sound in sounds.items():
        save_wav(folder / name, sound.astype(np.int16))
    plan = Wav(folder, length=50, test_fraction=0.3).plan()
    dataset = prepare(plan, tmp_path / "out")
    assert (dataset.shape, dataset.bins.count, dataset.train.dtype) == ((2, 50), 65536, np.uint16)
    for split, stored in (("train", dataset.train), ("test", dataset.test)):
        mine = [sounds[name] for name in sorted(sounds) if for_testing(name, 0.3) == (split == "test")]
        pieces = [sound[: len(sound) // 50 * 50].reshape(-1, 50, 2).transpose(0, 2, 1) for sound in mine]
        assert np.array_equal(stored.astype(int) - 2**15, np.concatenate(pieces))
    write_wav(tmp_path / "back.wav", dataset.train[0], rate=plan.options["rate"])
    with wave.open(str(tmp_path / "back.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getsampwidth(), file.getnframes()) == (2, 8000, 2, 50)
        sound = np.frombuffer(file.readframes(50), "<i2").reshape(50, 2).T
    assert np.array_equal(sound.astype(int) + 2**15, dataset.train[0])


def test_unusable_sound_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 to 65535"):
        write_wav(tmp_path / "x.wav", np.array([[70000]]), 8000)
    assert not list(tmp_path.iterdir())
    silence = np.zeros((100, 1), np.int16)

    def rejected(why: str, length: int = 10) -> None:
        with pytest.raises(DataError, match=why):
            Wav(tmp_path, length).plan()

    rejected("holds no WAV file. Give the folder")
    save_wav(tmp_path / "a.wav", silence)
    rejected("smaller --length", 1000)
    save_wav(tmp_path / "b.wav", silence, rate=44100)
    rejected(r"b\.wav has 1 channels at 44100 Hz")
    save_wav(tmp_path / "b.wav", silence.astype(np.int32))
    rejected(r"b\.wav has 32 bits")
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    rejected(r"b\.wav is not a PCM WAV file")
    (tmp_path / "b.wav").unlink()
    os.mkfifo(tmp_path / "b.wav")
    rejected("pipe")


@dataclass(frozen=True)
class ClassLabel:
    names: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    dtype: str


class Table(list):
    """The used part of the interface of a hub dataset."""

    column_names = ("image", "label")
    features: ClassVar[dict[str, ClassLabel | Value]] = {}

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def hub(monkeypatch: pytest.MonkeyPatch, feature: ClassLabel | Value, **parts: Table) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = lambda path, revision: parts  # type: ignore[attr-defined]
    module.ClassLabel, module.Value = ClassLabel, Value  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(Table, "features", {"label": feature})


def table(n: int, classes: int = 3) -> Table:
    return Table({"image": Image.fromarray(noise(i % classes, 8, 8)), "label": i % classes} for i in range(n))


def test_splits_of_a_hub_dataset_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table(30)
    rows[3] = {"image": "a string", "label": 0}
    hub(monkeypatch, Value("string"), train=rows, validation=Table(rows[:2]))
    plan = HuggingFace("someone/cats", size=8, skip=1).plan()
    dataset = prepare(plan, tmp_path / plan.name)
    assert (plan.name, len(dataset.train), len(dataset.test), dataset.labels) == ("cats", 29, 2, None)
    assert np.array_equal(dataset.train[0], noise(0, 8, 8).transpose(2, 0, 1))
    assert dataset.manifest.skipped == ("row 3 holds a str, not an image",)
    assert sum(block.items for block in plan.blocks(10)) == 22
    with pytest.raises(UsageError, match="it has image, label"):
        HuggingFace("someone/cats", column="picture").plan()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"bsi\[hub\]"):
        HuggingFace("someone/cats").plan()


@pytest.mark.parametrize("feature", [ClassLabel(("cat", "dog", "owl")), Value("int64")], ids=repr)
def test_labels_and_class_names_of_a_hub_dataset_are_kept(tmp_path, monkeypatch, feature):
    rows = table(300)
    rows[7] = {"image": None, "label": 1}
    hub(monkeypatch, feature, train=rows)
    dataset = prepare(HuggingFace("someone/cats", size=8, skip=1).plan(), tmp_path / "out")
    assert len(dataset.test) > 5
    assert (len(dataset.labels.train) + len(dataset.labels.test), dataset.labels.classes) == (299, 3)
    for images, labels in ((dataset.train, dataset.labels.train), (dataset.test, dataset.labels.test)):
        for image, label in zip(images, labels, strict=True):
            assert np.array_equal(image, noise(int(label), 8, 8).transpose(2, 0, 1))
    assert dataset.labels.names == dataset.manifest.classes == (getattr(feature, "names", ()))


@pytest.mark.parametrize("marked", [-1, None, 2])
def test_incomplete_labels_of_a_hub_dataset_are_dropped(tmp_path, monkeypatch, marked):
    hidden = Table({**row, "label": marked} for row in table(2))
    hub(monkeypatch, ClassLabel(("cat", "dog")), train=table(4, classes=2), test=hidden)
    dataset = prepare(HuggingFace("someone/cats", size=8).plan(), tmp_path / "out")
    assert (len(dataset.test), dataset.labels, dataset.manifest.classes) == (2, None, ())


def test_a_dataset_of_the_real_package_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="read by the package itself: pip install datasets")
    for i in range(6):
        path = tmp_path / "photos" / "train" / ("cats" if i % 2 else "dogs") / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(i % 2, 8, 8)).save(path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    dataset = prepare(HuggingFace(str(tmp_path / "photos"), size=8, test_fraction=0.0).plan(), tmp_path / "out")
    assert dataset.labels.names == ("cats", "dogs")
    for image, label in zip(dataset.train, dataset.labels.train, strict=True):
        assert np.array_equal(image, noise(1 - int(label), 8, 8).transpose(2, 0, 1))
