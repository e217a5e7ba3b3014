"""Small inputs for the sources of data, and the rows of their plans."""

import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bsi.data.prepare import Preparation
from bsi.data.published import BATCHES

CORPUS = "Grüße, 世界! 🙂 one two three four five six seven eight nine ten.\n" * 40


def rows(plan: Preparation, start: int = 0) -> np.ndarray:
    """The rows of the items from `start` on, of both splits in order."""
    return np.concatenate([np.empty((0, *plan.shape), plan.dtype), *(block.rows for block in plan.blocks(start))])


def saved(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


def noise(seed: int, height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save_wav(path: Path, sound: np.ndarray, rate: int = 8000) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(sound.shape[1])
        file.setsampwidth(sound.dtype.itemsize)
        file.setframerate(rate)
        file.writeframes(sound.astype(sound.dtype.newbyteorder("<")).tobytes())


def save_mnist(folder: Path, between: str = "-", end: str = "", pack: Callable[[bytes], bytes] = bytes) -> dict:
    """30 and 7 images as four idx files; returns the arrays."""
    folder.mkdir()
    arrays = {}
    for stem, n in (("train", 30), ("t10k", 7)):
        for kind, shape in (("images", (n, 5, 5)), ("labels", (n,))):
            array = arrays[f"{stem}-{kind}"] = np.random.default_rng(n).integers(0, 256, shape, dtype=np.uint8)
            header = bytes([0, 0, 8, array.ndim]) + np.array(shape, ">u4").tobytes()
            path = folder / f"{stem}-{kind}{between}idx{array.ndim}-ubyte{end}"
            path.write_bytes(pack(header + array.tobytes()))
    return arrays


def save_imagenet(folder: Path) -> Path:
    """Batches of 3 to 13 images in the official format."""
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        rng = np.random.default_rng(number)
        images = rng.integers(0, 256, (3 + number, 3072), dtype=np.uint8)
        np.savez(folder / name, data=images, labels=rng.integers(1, 1001, len(images)), mean=images.mean(0))
    return folder
