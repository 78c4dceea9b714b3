"""Pictures become the pixels that transformers makes of them, or a one-line error."""

from __future__ import annotations

import dataclasses
import struct
import warnings
import zlib
from typing import Any

import numpy as np
import PIL.Image
import pytest

from ondevice.bundle_format.vision import BUDGETS, VisionEntry
from ondevice.errors import OndeviceError, PromptError, UsageError
from ondevice.media import images
from ondevice.media.images import Picture, Pixels
from ondevice.text.media_parts import Image
from tests.media.pictures_made import noise, png, saved

E2B = VisionEntry(
    graph="vision.onnx", layers=16, hidden_size=768, intermediate_size=3072, query_heads=12, head_dim=64, norm_eps=1e-6,
    theta=100.0, patch=16, pool=3, positions=10240, standardize=False, tokens=280, begin_token_id=1, image_token_id=2,
    end_token_id=3,
)  # fmt: skip

SIZES = [
    # width, height, tokens at most, resized width and height
    (1000, 1000, 280, 768, 768),
    (4000, 3000, 280, 912, 672),
    (1920, 1080, 280, 1056, 576),
    (640, 480, 140, 624, 480),
    (300, 900, 140, 288, 960),
    (4000, 30, 140, 6528, 48),
    (8000, 10, 140, 6720, 48),
    (640, 480, 70, 432, 336),
    (3, 900, 280, 48, 13440),
    (1, 1, 280, 768, 768),
    (512, 512, 1120, 1584, 1584),
    (768, 768, 280, 768, 768),
]


def opened(source: Any, tokens: int | None = None, vision: VisionEntry = E2B) -> Picture:
    return Picture(Image(source), vision, tokens, "picture 1")


def pixels(source: Any, tokens: int | None = None) -> np.ndarray:
    return opened(source, tokens).piece(0).values


def refused(source: Any, error: type[OndeviceError] = PromptError, vision: VisionEntry = E2B) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(error) as caught:
            opened(source, vision=vision).piece(0)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize(("width", "height", "tokens", "wide", "tall"), SIZES)
def test_sizes(width: int, height: int, tokens: int, wide: int, tall: int) -> None:
    assert images.resized(height, width, tokens, E2B, "it") == (tall, wide)


@pytest.mark.needs("oracle")
def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    rng = np.random.default_rng(0)
    for height, width in np.exp(rng.uniform(0, np.log(9000), (400, 2))).astype(int).tolist():
        for tokens in BUDGETS:
            expected = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
            if max(expected) <= E2B.positions * E2B.patch:
                assert images.resized(height, width, tokens, E2B, "it") == expected


def in_mode(mode: str, height: int = 45, width: int = 61) -> PIL.Image.Image:
    channels = {"RGB": 3, "L": 1, "RGBA": 4, "LA": 2, "P": 3, "CMYK": 4, "1": 1}[mode]
    made = noise(height, width, channels)
    if mode == "P":
        return PIL.Image.fromarray(made).quantize(40)
    if mode == "1":
        return PIL.Image.fromarray(made[..., 0]).convert("1")
    return PIL.Image.fromarray(made[..., 0] if channels == 1 else made, mode=None if mode == "RGB" else mode)


@pytest.mark.needs("oracle")
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "CMYK", "1"])
@pytest.mark.parametrize("tokens", BUDGETS)
def test_patches_are_those_of_transformers(mode: str, tokens: int) -> None:
    """The same bits, for enlarged and reduced pictures."""
    from transformers import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(max_soft_tokens=tokens)
    for height, width in ((45, 61), (700, 300), (5, 400)) if tokens < 1000 else ((45, 61),):
        picture = in_mode(mode, height, width)
        expected = processor([picture], return_tensors="np")
        made = opened(picture, tokens).piece(0)
        patches, column, row = made.feeds().values()
        count = len(patches)
        assert made.tokens == int(expected["num_soft_tokens_per_image"][0])
        assert count == 9 * made.tokens
        places = expected["image_position_ids"][0][:count]
        assert (expected["image_position_ids"][0][count:] == -1).all()
        order = np.lexsort((column, row))  # the reference's: by rows of the picture
        np.testing.assert_array_equal(np.stack([column, row], -1)[order], places)
        np.testing.assert_array_equal(patches[order], expected["pixel_values"][0][:count])


def test_patches_of_a_soft_token_follow_one_another() -> None:
    made = Pixels(noise(96, 144), 16, 3)
    patches, column, row = made.feeds().values()
    assert made.tokens == 6
    for token in range(6):
        own = slice(9 * token, 9 * token + 9)
        assert (column[own] // 3 == token % 3).all()
        assert (row[own] // 3 == token // 3).all()
    np.testing.assert_array_equal(patches[4].reshape(16, 16, 3), (made.values[16:32, 16:32] / 255).astype(np.float32))


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "JPEG"])
def test_formats(kind: str) -> None:
    picture = PIL.Image.fromarray(noise(96, 96))
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    found, plain = pixels(saved(picture, kind, **options)).astype(int), pixels(picture).astype(int)
    assert abs(found - plain).mean() < {"GIF": 12, "JPEG": 3}.get(kind, 0.001)


def test_a_jpeg_in_cmyk() -> None:
    picture = PIL.Image.fromarray(noise(96, 96)).convert("CMYK")
    found = pixels(saved(picture, "JPEG", quality=95)).astype(int)
    assert abs(found - pixels(picture).astype(int)).mean() < 4


@pytest.mark.parametrize("rotation", range(1, 9))
def test_a_cameras_rotation_is_applied(rotation: int) -> None:
    upright = PIL.Image.fromarray(noise(40, 100))
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # members of PIL.Image.Transpose
    stored = upright if rotation == 1 else upright.transpose(PIL.Image.Transpose(undo[rotation]))
    exif = PIL.Image.Exif()
    exif[0x0112] = rotation
    for kind in ("PNG", "JPEG"):
        file = saved(stored, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
        picture = opened(file, 70)
        made = picture.piece(0)
        assert [made.tokens] == picture.counts
        assert made.values.shape[1] > made.values.shape[0]
        assert abs(made.values.astype(int) - pixels(upright, 70).astype(int)).mean() < (0.001 if kind == "PNG" else 4)


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_a_rotation_that_does_not_exist_is_none(value: int) -> None:
    picture = PIL.Image.fromarray(noise(40, 100))
    exif = PIL.Image.Exif()
    exif[0x0112] = value
    np.testing.assert_array_equal(pixels(saved(picture, exif=exif), 70), pixels(picture, 70))


def test_16_bits_keep_the_upper_8() -> None:
    gray = noise(96, 96, 1)[..., 0]
    deep = PIL.Image.fromarray(gray.astype(np.uint16) * 256 + 77)
    assert deep.mode.startswith("I")
    expected = pixels(PIL.Image.fromarray(gray))
    np.testing.assert_array_equal(pixels(deep), expected)
    np.testing.assert_array_equal(pixels(saved(deep)), expected)


def test_8_bits_in_integers_of_32_are_8_bits() -> None:
    gray = noise(96, 96, 1)[..., 0]
    wide = PIL.Image.fromarray(gray.astype(np.int32))
    assert wide.mode == "I"
    np.testing.assert_array_equal(pixels(wide), pixels(PIL.Image.fromarray(gray)))
    deep = PIL.Image.fromarray(gray.astype(np.int32) * 256 + 77)
    np.testing.assert_array_equal(pixels(deep), pixels(PIL.Image.fromarray(gray)))


def test_a_lack_of_memory_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = opened(saved(PIL.Image.fromarray(noise(60, 80))), 70)

    def load(self: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", load)
    with pytest.raises(MemoryError):
        picture.piece(0)


def test_transparent_pixels_are_white() -> None:
    hidden = noise(48, 48, 4)
    hidden[..., 3] = 0
    assert (pixels(saved(PIL.Image.fromarray(hidden))) == 255).all()
    palette = PIL.Image.new("P", (48, 48), 3)
    palette.putpalette([0, 0, 0] * 5)
    assert (pixels(saved(palette, "PNG", transparency=3)) == 255).all()
    assert (pixels(saved(palette, "GIF", transparency=3)) == 255).all()
    assert (pixels(saved(palette, "PNG")) == 0).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation(kind: str) -> None:
    frames = [PIL.Image.new("RGB", (96, 96), color) for color in ("red", "blue")]
    file = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    found = pixels(file)
    assert (abs(found.astype(int) - np.array([255, 0, 0])) < 6).all()


def test_arrays() -> None:
    picture = noise(60, 80)
    np.testing.assert_array_equal(pixels(picture), pixels(PIL.Image.fromarray(picture)))
    np.testing.assert_array_equal(pixels(picture[..., 0]), pixels(PIL.Image.fromarray(picture[..., 0].copy())))
    for bad in (picture.astype(np.float32), picture[..., :2], np.zeros((0, 5, 3), np.uint8), picture.reshape(-1)):
        assert "use uint8" in refused(bad)


def test_other_sources() -> None:
    assert "is a int" in refused(7)
    assert "is a NoneType" in refused(None)
    assert "cannot be read" in refused("a\0b")


def test_a_truncated_file() -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(PIL.Image.fromarray(noise(200, 300)), kind)
        for length in (0, 5, 30, len(whole) // 3, len(whole) - 200):
            assert "picture 1 is damaged" in refused(whole[:length])


def test_other_formats_are_refused() -> None:
    picture = PIL.Image.fromarray(noise(20, 20))
    for kind in ("TIFF", "BMP", "ICO", "PPM", "PDF"):
        assert "no PNG, JPEG, WEBP or GIF file" in refused(saved(picture, kind))
    assert "no PNG, JPEG, WEBP or GIF file" in refused(b"<svg xmlns='http://www.w3.org/2000/svg'/>")


def bomb(width: int, height: int) -> bytes:
    """A PNG file of some hundred bytes that claims to have so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 500)) + chunk(b"IEND", b"")
    )


def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert "has 9000 x 9000 pixels" in refused(bomb(9000, 9000))
    assert "has 20000 x 10 pixels" in refused(bomb(20000, 10))
    for side in (16_000, 1 << 30):
        assert "has too many pixels: 50 million are possible" in refused(bomb(side, side))
    assert "picture 1 is damaged" in refused(bomb(0, 5))


def test_too_many_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 1 << 20)
    assert "has more than 1 MB" in refused(b"x" * (1 << 20) + b"x")
    path = tmp_path / "large"
    path.write_bytes(b"x" * (1 << 20) + b"x")
    assert "has more than 1 MB" in refused(path)


def test_a_picture_too_narrow_for_the_tower() -> None:
    small = dataclasses.replace(E2B, positions=60)
    assert "is too narrow, 10 x 900 pixels" in refused(noise(900, 10), vision=small)


@pytest.mark.parametrize("tokens", [0, 71, 2000, True, "280"])
def test_numbers_of_tokens(tokens: Any) -> None:
    with pytest.raises(UsageError, match=r"70, 140, 280, 560, 1120 tokens at most, not"):
        Picture(Image(png(), tokens), E2B, None, "picture 1")


def test_a_picture_chooses_before_the_generation_does() -> None:
    assert Picture(Image(png(), 70), E2B, 560, "it").counts[0] <= 70
    assert 280 < opened(png(), 560).counts[0] <= 560
    assert 140 < opened(png()).counts[0] <= 280


def test_digests() -> None:
    first, same, other = (opened(png(seed=seed), 70).piece(0) for seed in (0, 0, 1))
    assert first.digest() == same.digest() != other.digest()
    flat = Pixels(np.zeros((48, 96, 3), np.uint8), 16, 3), Pixels(np.zeros((96, 48, 3), np.uint8), 16, 3)
    assert flat[0].digest() != flat[1].digest()
