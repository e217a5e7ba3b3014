"""Lossless compression: exact restoration, the size of the bound, and detection of damage."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import bsi
from bsi import BFN, BSI, VDM, Bins
from bsi.codec import compress, decompress
from bsi.codec_file import pack, unpack
from bsi.errors import BsiError, DataError, UsageError

pytest.importorskip("constriction")

SHAPE, BINS = (1, 4, 4), Bins(-1.0, 1.0, 9)


class Shrink(nn.Module):
    """An untrained network that predicts the data's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 16).reshape(SHAPE))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return 0.1 * x + self.weight


def model(method: object = None, bins: Bins | None = BINS) -> bsi.Model:
    return bsi.Model(Shrink(), method or BSI(alpha_M=1e3), SHAPE, data=bins).eval()


def data(count: int = 40) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 9, (count, *SHAPE), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize(
    "method",
    [BSI(alpha_M=1e3), BSI(alpha_M=1e3, gamma_0=float("inf")), BFN(sigma_1=0.03), VDM(nu_max=1e3)],
    ids=["BSI", "BSI without belief prior", "BFN", "VDM"],
)
def test_decompression_is_lossless_for_every_method(method: object) -> None:
    ours, x = model(method), data()
    packed = compress(ours, x, steps=6, batch_size=5)
    assert packed.plain < len(x)
    assert torch.equal(decompress(ours, packed.blob), x)


@pytest.mark.parametrize("name", ["level", "pixels", "dct", "learned"])
def test_decompression_is_lossless_with_variance_aware_transitions(name: str) -> None:
    ours, x = model(), data()
    variance = ours.fit_variance(x, name)
    assert torch.equal(decompress(ours, compress(ours, x, 4, variance).blob), x)


def test_a_long_first_step_with_a_large_variance_is_coded() -> None:
    """Where the first steps would be useless, a fitted grid takes them at once: the first latent is far from 0."""
    ours = bsi.Model(Shrink(), BSI(), SHAPE, data=Bins.uint8()).eval()
    x = torch.randint(0, 256, (40, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    variance = ours.fit_variance(x, "level")
    assert float(variance.grid(4)[1]) > 100
    assert torch.equal(decompress(ours, compress(ours, x, 4, variance).blob), x)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [None, "dct", "learned"])
def test_decompression_is_lossless_on_a_gpu(name: str | None) -> None:
    ours, x = model().to("cuda"), data()
    variance = None if name is None else ours.fit_variance(x.to("cuda"), name)
    assert torch.equal(decompress(ours, compress(ours, x, 4, variance).blob), x)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_samples_are_stored_uncompressed(count: int) -> None:
    packed = compress(model(), data(count), steps=8)
    assert packed.plain == count
    assert torch.equal(decompress(model(), packed.blob), data(count))


def test_the_initial_bits_do_not_depend_on_the_number_of_steps() -> None:
    """The latents of three levels at a time take about as many bits as three plain samples; one is in reserve."""
    assert all(compress(model(), data(), steps).plain in (3, 4, 5) for steps in (4, 40))


def test_more_than_256_bins_are_compressed() -> None:
    ours = bsi.Model(Shrink(), BSI(alpha_M=1e6), SHAPE, data=Bins.int16()).eval()
    x = torch.randint(0, 65536, (12, *SHAPE), dtype=torch.int32)
    assert torch.equal(decompress(ours, compress(ours, x, steps=3).blob), x)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "level"])
def test_the_size_is_the_finite_bound(name: str) -> None:
    """Within 2 % of the bound with as many steps, on the digits."""
    digits = bsi.load("digits")
    from bsi.data import open_dataset

    files = open_dataset("digits")
    x, variance = torch.as_tensor(files.test[:]), None
    if name != "none":
        variance = digits.fit_variance(files.train[:512], name)
    packed = compress(digits, x, 32, variance)
    bound = digits.elbo(x, finite_k=32, measure=20, variance=variance)
    assert packed.net_bits_per_dim == pytest.approx(float(bound), rel=0.02, abs=3 * bound.monte_carlo_error)


def test_every_flipped_byte_is_detected() -> None:
    ours, x = model(), data(30)
    blob = compress(ours, x, steps=3).blob
    for place in range(len(blob)):
        with pytest.raises(DataError):
            decompress(ours, blob[:place] + bytes([blob[place] ^ 0x40]) + blob[place + 1 :])


@pytest.mark.parametrize("length", [0, 3, 10, 100, -1])
def test_a_truncated_file_is_rejected(length: int) -> None:
    with pytest.raises(DataError):
        decompress(model(), compress(model(), data(), steps=3).blob[:length])


def resealed(blob: bytes) -> bytes:
    return blob[:-32] + hashlib.sha256(blob[:-32]).digest()


def test_damage_with_a_valid_hash_is_rejected() -> None:
    ours, x = model(), data(30)
    blob = compress(ours, x, steps=3).blob
    for place in range(0, len(blob) - 32, 19):
        damaged = resealed(blob[:place] + bytes([blob[place] ^ 0x10]) + blob[place + 1 :])
        with pytest.raises(BsiError):
            decompress(ours, damaged)


@pytest.mark.parametrize("word", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_words_that_no_encoder_writes_are_reported_as_damage(word: bytes) -> None:
    header, words = unpack(compress(model(), data(), steps=3).blob)
    with pytest.raises(DataError, match="damaged"):
        decompress(model(), pack(header, word * (len(words) // 4)))


def test_a_header_that_claims_a_terabyte_is_rejected_before_memory_is_taken() -> None:
    ours = model()
    header, words = unpack(compress(ours, data(30), steps=3).blob)
    coded = sum(header.sizes)
    huge = 1 << 38
    for lie in (
        {"plain": huge, "count": huge + coded},
        {"sizes": [1 << 16] * 4, "count": header.plain + (1 << 18), "checks": [0] * 5},
        {"sizes": [900], "count": header.plain + 900, "checks": [0, 0]},
        {"steps": 1 << 30},
    ):
        with pytest.raises(DataError, match="header"):
            decompress(ours, pack(replace(header, **lie), words))


def test_a_damaged_variance_with_a_valid_hash_is_rejected() -> None:
    ours, x = model(), data(30)
    blob = compress(ours, x, 3, ours.fit_variance(x, "learned")).blob
    header, words = unpack(blob)
    stored = header.variance
    assert stored is not None
    for damage in (
        {"kind": "pca"}, {"kind": "level"}, {"knots": 0}, {"knots": 7}, {"logs": "?"}, {"ending": ""}, {"weights": ""},
        {"colors": [[1.0, 0.0]]}, {"colors": [[math.nan]]}, {"scales": [math.nan] * len(stored["scales"])},
        {"scales": []}, {"logs": stored["logs"][:4] + "AAAA" + stored["logs"][8:]},
    ):  # fmt: skip
        with pytest.raises(BsiError):
            decompress(ours, pack(replace(header, variance={**stored, **damage}), words))


def test_another_network_is_rejected_before_decoding() -> None:
    blob, other = compress(model(), data(), steps=3).blob, model()
    with torch.no_grad():
        other.denoiser.backbone.weight[0, 0, 0] += 1e-6
    with pytest.raises(UsageError, match="another model"):
        decompress(other, blob)


def test_different_predictions_are_detected_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = compress(model(), data(), steps=3).blob
    monkeypatch.setattr(Shrink, "forward", lambda self, x, t: 0.1 * x + self.weight + 1e-6)
    with pytest.raises(UsageError, match="predictions"):
        decompress(model(), blob)


def test_unsupported_data_is_not_compressed() -> None:
    with pytest.raises(UsageError, match="bins"):
        compress(model(bins=None), data())
    with pytest.raises(UsageError, match="indices"):
        compress(model(), data().float())
    with pytest.raises(UsageError, match="shape"):
        compress(model(), data()[:, :, :2])
    with pytest.raises(DataError, match="bins"):
        compress(model(), data() + 5)
    with pytest.raises(UsageError, match="steps"):
        compress(model(), data(), steps=0)
    ours = model()
    with pytest.raises(UsageError, match="pca"):
        compress(ours, data(), 4, ours.fit_variance(data(), "pca"))
