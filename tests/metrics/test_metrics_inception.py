"""The FID network: its resize, its folded weights, and its features against those of the original graph."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bsi.errors import DataError, UsageError
from bsi.io import data_folder, download
from bsi.metrics import inception
from bsi.metrics.inception import (
    NAME,
    Conv,
    Inception,
    cached_weights,
    expected_shapes,
    read_weights,
    tf1_bilinear,
    weights_hash,
    weights_path,
)
from bsi.metrics.quality import PUBLISHED_HASH, Extractor, QualityWarning, metric_name, require_images

GOLDEN = Path(__file__).parents[1] / "golden" / "inception_cifar10.npz"
TEST_BATCH = data_folder() / "cifar-10-batches-bin" / "test_batch.bin"

needs_weights = pytest.mark.skipif(not weights_path().exists(), reason=f"{weights_path()} is not here")
needs_cifar = pytest.mark.skipif(not TEST_BATCH.exists(), reason=f"{TEST_BATCH} is not here")


def tf1_by_hand(image: np.ndarray, size: int) -> np.ndarray:
    """TensorFlow 1's ResizeBilinear kernel, transcribed pixel by pixel in float32."""
    channels, height, width = image.shape
    f = np.float32
    out = np.empty((channels, size, size), np.float32)
    for i in range(size):
        y = f(i) * (f(height) / f(size))
        top, y_lerp = int(y), y - f(int(y))
        bottom = min(top + 1, height - 1)
        for j in range(size):
            x = f(j) * (f(width) / f(size))
            left, x_lerp = int(x), x - f(int(x))
            right = min(left + 1, width - 1)
            pixels = image.astype(np.float32)
            upper = pixels[:, top, left] + (pixels[:, top, right] - pixels[:, top, left]) * x_lerp
            lower = pixels[:, bottom, left] + (pixels[:, bottom, right] - pixels[:, bottom, left]) * x_lerp
            out[:, i, j] = upper + (lower - upper) * y_lerp
    return out


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 37), (5, 9, 23), (40, 50, 23), (23, 23, 23), (1, 2, 9)])
def test_resize_is_tensorflows_bit_for_bit(height: int, width: int, size: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, height, width), dtype=np.uint8)
    ours = tf1_bilinear(torch.from_numpy(image).float()[None], size)[0]
    np.testing.assert_array_equal(ours.numpy(), tf1_by_hand(image, size))


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, scaled so that activations keep their size."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in expected_shapes().items():
        if name.endswith("conv.weight"):
            fan_in = shape[1] * shape[2] * shape[3]
            weights[name] = torch.randn(shape, generator=generator) * (2 / fan_in) ** 0.5
        elif name.endswith("running_var"):
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            weights[name] = torch.rand(shape, generator=generator) * (1.0 if name.endswith("bn.weight") else 0.1)
    weights["fc.weight"] = torch.zeros(3, 2)  # pytorch-fid's file holds the last layer too
    path = tmp_path_factory.mktemp("weights") / "other.safetensors"
    save_file(weights, path)
    return path


def test_folding_is_convolution_then_batch_norm() -> None:
    torch.manual_seed(0)
    conv = Conv(8, 5, (1, 7)).requires_grad_(False).eval()
    for tensor in (conv.bn.weight, conv.bn.bias, conv.bn.running_mean, conv.bn.running_var):
        tensor.uniform_(0.5, 1.5)
    x = torch.randn(2, 8, 9, 9)
    expected = F.relu(conv.bn(conv.conv(x)))
    conv.fold()
    torch.testing.assert_close(conv(x), expected, rtol=1e-5, atol=1e-5)


def test_other_weights_give_a_warning_and_are_never_called_fid(other_weights: Path) -> None:
    before = torch.backends.cudnn.conv.fp32_precision
    with pytest.warns(QualityWarning, match="not the published weights"):
        extractor: Extractor = Inception(other_weights, batch=2)
    assert metric_name(extractor) == "fd-inception-other"
    images = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    features = extractor(images)
    assert features.shape == (3, 2048)
    assert features.std() > 0
    torch.testing.assert_close(extractor(images[2:])[0], features[2], rtol=1e-4, atol=1e-5)
    assert extractor(images[:0]).shape == (0, 2048)
    assert torch.backends.cudnn.conv.fp32_precision == before, "the program's own setting"


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 3, 8, 8), torch.float32, r"8-bit.*got torch.float32.*never truncate"),
        ((2, 8, 8, 3), torch.uint8, r"\(n, 3, height, width\), got \(2, 8, 8, 3\)"),
        ((2, 3, 0, 8), torch.uint8, r"got \(2, 3, 0, 8\)"),
    ],
)
def test_only_eight_bit_images_are_accepted(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(DataError, match=message):
        require_images(torch.zeros(shape, dtype=dtype))


def test_the_hash_of_features_depends_on_values_only() -> None:
    def weights(value: float) -> Mapping[str, Tensor]:
        return {"b": torch.full((2,), value), "a": torch.zeros(1, 3)}

    assert weights_hash(weights(1.0)) == weights_hash(dict(reversed(weights(1.0).items())))
    assert weights_hash(weights(1.0)) != weights_hash(weights(1.0 + 1e-7))
    assert weights_hash({"a": torch.zeros(3)}) != weights_hash({"a": torch.zeros(3, 1)})


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """pytorch-fid's file, at its address: a pickled state dict, with layers that are not needed."""
    state = {name: torch.full(shape, 0.5) for name, shape in expected_shapes().items()}
    file = tmp_path / "pt_inception.pth"
    torch.save({**state, "fc.bias": torch.zeros(1008)}, file)
    monkeypatch.setenv("BSI_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(inception, "URL", file.as_uri())
    monkeypatch.setattr(inception, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    return file.read_bytes()


def test_missing_weights_are_downloaded_once_by_concurrent_callers(published, monkeypatch):
    fetched = []
    monkeypatch.setattr(inception, "download", lambda *args: fetched.append(args) or download(*args))
    with ThreadPoolExecutor(3) as ranks:
        paths = list(ranks.map(lambda _: cached_weights(), range(3)))
    assert (paths, len(fetched)) == ([weights_path()] * 3, 1)
    found = read_weights(weights_path())
    assert found.keys() == expected_shapes().keys()
    assert all(bool((tensor == 0.5).all()) for tensor in found.values())
    assert not list(weights_path().parent.glob("*.pth*"))


def test_downloaded_weights_have_the_pinned_hash_or_are_deleted(
    published: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(inception, "SHA256", "0" * 64)
        with pytest.raises(DataError, match=f"expected sha256 {'0' * 64}"):
            Inception()
    assert not [path for path in weights_path().parent.iterdir() if path.suffix != ".lock"]
    monkeypatch.setattr(inception, "URL", "http://127.0.0.1:9/pt_inception.pth")
    with pytest.raises(DataError, match=rf"cannot download .*put it into {weights_path().parent}"):
        Inception()
    weights_path().with_name("pt_inception.pth").write_bytes(published)  # by hand
    assert cached_weights() == weights_path()


def test_damaged_or_foreign_weights_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(DataError, match=r"not at .*weights.*bsi fid A B --weights PATH"):
        Inception(path)
    path.write_bytes(b"\x80\x02pickle")
    with pytest.raises(DataError, match="not a valid safetensors file"):
        Inception(path)
    save_file({"layer.weight": torch.zeros(2)}, path)
    with pytest.raises(DataError, match=r"lacks 470 of the 470 tensors.*Conv2d_1a_3x3.* first"):
        Inception(path)
    shapes = {**expected_shapes(), "Mixed_7c.branch_pool.bn.bias": (7,)}
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, path)
    with pytest.raises(DataError, match=r"lacks 1 of the 470 tensors.*branch_pool\.bn\.bias first"):
        Inception(path)


def test_a_precision_that_the_device_lacks_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"tf32.*NVIDIA"):
        Inception(device="cpu", precision="tf32")


@needs_weights
@needs_cifar
@pytest.mark.parametrize(("device", "precision"), [("cpu", "float32"), ("cuda", "float32"), ("cuda", "tf32")])
@pytest.mark.slow
def test_features_of_64_images_are_those_of_the_original_graph(device: str, precision: str) -> None:
    """Golden: 16 of the 2048 features from the TorchScript export of the TensorFlow graph, with its own resize."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    golden = np.load(GOLDEN)
    records = np.fromfile(TEST_BATCH, np.uint8).reshape(-1, 3073)
    images = torch.from_numpy(records[golden["images"], 1:].reshape(-1, 3, 32, 32))
    extractor = Inception(device=device, precision=precision, batch=16)
    assert (extractor.hash, extractor.name, metric_name(extractor)) == (PUBLISHED_HASH, NAME, "FID")
    ours, theirs = extractor(images).cpu()[:, golden["dims"]].double(), torch.from_numpy(golden["features"]).double()
    tolerance = 1e-5 if precision == "float32" else 2e-3
    assert ((ours - theirs).norm(dim=0) / theirs.norm(dim=0)).max() < tolerance
