"""Opens, decodes and resizes pictures as transformers' `Gemma4ImageProcessorPil` does, to the same bits.

A picture is resized to fill its number of soft tokens: small ones are enlarged. Files are untrusted: the header is read
first, and what is too large is refused before it is decoded. Transparent pixels are laid over white, a camera's
rotation (EXIF) is applied, and of an animation the first frame is taken.

A picture has as many soft tokens upright as on its side, so the rotation is looked up when it is decoded: a PNG file
may have it after its pixels, and Pillow decodes these to find it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ondevice.bundle_format import graph_io
from ondevice.bundle_format.vision import BUDGETS, VisionEntry
from ondevice.errors import MissingDependencyError, PromptError, UsageError, reason
from ondevice.text.media_parts import MAX_BYTES, Image, file_content

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

MAX_PIXELS = 50_000_000
MAX_SIDE = 16384
"""Largest picture that is decoded."""

POSSIBLE = f"{MAX_PIXELS // 1_000_000} million are possible, and {MAX_SIDE} on a side"
"""The end of a message about one that is larger."""

MAX_READS = 1 << 15
"""Most parts of a file that Pillow reads one by one, in Python: chunks, markers and blocks take up to four each. A file
of 32 MB with PNG's usual chunks of 8 KB has 16,000; one of empty chunks would have millions, and take many seconds.
"""

MAX_PROFILES = 64
"""Most colour profiles that a PNG file may seem to have. It has one; Pillow unpacks each, a megabyte of a kilobyte."""

STRIP = 256
"""Rows of pixels that are converted to RGB at once: a large picture is in memory twice then, else four times."""

_TO_FLOAT = (np.arange(256) * (1 / 255)).astype(np.float32)
"""Each value of a pixel from 0 to 1, rounded as the reference does: in float64, then to float32."""

_warnings_lock = threading.Lock()


@dataclass(frozen=True)
class Pixels:
    """A resized picture.

    values : uint8[H, W, 3], both sides multiples of a soft token's
    patch, pool : as in `VisionEntry`
    """

    values: NDArray[np.uint8]
    patch: int
    pool: int

    @property
    def tokens(self) -> int:
        """The number of soft tokens."""
        return self.values.size // (3 * (self.patch * self.pool) ** 2)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes

    def digest(self) -> bytes:
        """Identifies the soft tokens: equal pixels have equal ones."""
        return hashlib.sha256(repr(self.values.shape).encode() + self.values.tobytes()).digest()

    def feeds(self) -> Mapping[str, NDArray[Any]]:
        """The inputs of the tower's graph: patches, and the column and row of each; see `graph_io`."""
        patch, pool = self.patch, self.pool
        height, width = (size // (patch * pool) for size in self.values.shape[:2])
        blocks = self.values.reshape(height, pool, patch, width, pool, patch, 3).transpose(0, 3, 1, 4, 2, 5, 6)
        places = np.indices((height * pool, width * pool)).reshape(2, height, pool, width, pool)
        row, column = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        return {
            graph_io.PATCHES: _TO_FLOAT[blocks.reshape(-1, 3 * patch**2)],
            graph_io.COLUMN: column.astype(np.int64),
            graph_io.ROW: row.astype(np.int64),
        }


class Picture:
    """A picture whose header was read and whose size was checked; `piece` decodes it.

    Attributes:
        counts: the number of soft tokens that it will have, the only item.
        size: the number of its pixels.
        file_bytes: see `Medium`.
    """

    def __init__(self, image: Image, vision: VisionEntry, tokens: int | None, name: str) -> None:
        """
        Args:
            image: the picture.
            vision: the tower that it is for.
            tokens: the most soft tokens of pictures that do not choose themselves; None takes the tower's number.
            name: what errors call it.

        Raises:
            PromptError: it cannot be read, is of another format, or is too large.
            UsageError: a number of tokens that is none of BUDGETS.
            MissingDependencyError: Pillow is not installed.
        """
        self._name, self._vision = name, vision
        most = next(each for each in (image.tokens, tokens, vision.tokens) if each is not None)
        if isinstance(most, bool) or most not in BUDGETS:
            raise UsageError(f"a picture takes {', '.join(map(str, BUDGETS))} tokens at most, not {most!r:.60}")
        self._most, self._source = int(most), self._checked(image.source)
        self.file_bytes = len(self._source) if isinstance(self._source, bytes) else None
        with self._reading(), self._opened() as picture:
            width, height = picture.size
        check_size(width, height, name)
        tall, wide = resized(height, width, most, vision, name)
        self.counts = [(tall // vision.side) * (wide // vision.side)]
        self.size = width * height

    def piece(self, index: int) -> Pixels:
        """Decode and resize it. Nothing of the whole picture is kept.

        Args:
            index: 0.

        Raises:
            PromptError: it is damaged.
            MemoryError: there is not enough memory.
        """
        from PIL import Image as Pillow
        from PIL import ImageOps

        with self._reading(), self._opened() as opened:
            opened.load()
            with _without_warnings():
                opened.getexif()
            if opened is self._source:  # the caller's own
                picture = on_white(ImageOps.exif_transpose(opened))
            else:
                ImageOps.exif_transpose(opened, in_place=True)
                picture = on_white(opened)
            tall, wide = resized(picture.height, picture.width, self._most, self._vision, self._name)
            if picture.size != (wide, tall):
                picture = picture.resize((wide, tall), Pillow.Resampling.BICUBIC)
            return Pixels(np.asarray(picture), self._vision.patch, self._vision.pool)

    def identity(self) -> bytes | None:
        """See `Medium`."""
        if not isinstance(self._source, bytes):
            return None
        return hashlib.sha256(self._source).digest() + self._most.to_bytes(2)

    def _checked(self, source: Any) -> Any:
        """The bytes of a file, a picture of Pillow, or an array of pixels."""
        try:
            from PIL import Image as Pillow
        except ImportError as error:
            raise MissingDependencyError("PIL", "images", what="a picture in a prompt") from error
        if isinstance(source, Pillow.Image):
            return source
        if isinstance(source, np.ndarray):
            good = source.ndim == 2 or (source.ndim == 3 and source.shape[2] in (3, 4))
            if source.dtype != np.uint8 or not good or not source.size:
                found = f"{source.dtype}{list(source.shape)}"
                raise PromptError(f"{self._name} is an array {found}: use uint8[height, width, 3]")
            return source
        if not isinstance(source, str | PathLike | bytes | bytearray | memoryview):
            raise PromptError(
                f"{self._name} is a {type(source).__name__}: pass a path, the bytes of a file, a PIL image or an array"
            )
        content = file_content(source, self._name, MAX_BYTES)
        if content.count(b"iCCP") > MAX_PROFILES:
            raise PromptError(f"{self._name} is damaged: it has more than {MAX_PROFILES} colour profiles")
        return content

    @contextmanager
    def _opened(self) -> Iterator[PIL.Image.Image]:
        """The picture with its header read, within `_reading`."""
        from PIL import Image as Pillow

        if isinstance(self._source, Pillow.Image):
            yield self._source
        elif isinstance(self._source, np.ndarray):
            yield Pillow.fromarray(np.ascontiguousarray(self._source))
        else:
            with _without_warnings():
                picture = Pillow.open(_File(self._source), formats=FORMATS)
            with picture:
                yield picture

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise whatever Pillow raises as a PromptError of one line, but for a lack of memory."""
        try:
            yield
        except (PromptError, MemoryError):
            raise
        except Exception as error:  # Pillow's readers raise nearly anything for a damaged file
            if type(error).__name__ == "DecompressionBombError":  # before the size is known here
                raise PromptError(f"{self._name} has too many pixels: {POSSIBLE}") from error
            known = f"{self._name} is damaged, or no {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file"
            said = "" if type(error).__name__ == "UnidentifiedImageError" else f" ({reason(error)})"
            raise PromptError(known + said) from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Without Pillow's warnings of large pictures, which are refused here, and of damaged fields of EXIF."""
    with _warnings_lock, warnings.catch_warnings():  # filters of warnings belong to the process
        warnings.simplefilter("ignore")
        yield


class _File(BytesIO):
    """The bytes of a file, of which MAX_READS parts at most are read."""

    _reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads += 1
        if self._reads > MAX_READS:
            raise ValueError(f"it has more than {MAX_READS} parts")
        return super().read(size)


def check_size(width: int, height: int, name: str) -> None:
    """Raise a PromptError for a picture that is too large to be decoded."""
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise PromptError(f"{name} has {width} x {height} pixels: {POSSIBLE}")


def resized(height: int, width: int, tokens: int, vision: VisionEntry, name: str) -> tuple[int, int]:
    """The height and width to which a picture is resized: multiples of a soft token's side, `tokens` of them at most.

    Source: get_aspect_ratio_preserving_size. A picture of one row or column of tokens keeps its ratio less well.

    Raises:
        PromptError: the tower has not as many positions, or the picture has no pixels.
    """
    if not height or not width:
        raise PromptError(f"{name} has {width} x {height} pixels")
    side = vision.side
    factor = math.sqrt(tokens * side**2 / (height * width))
    tall, wide = (math.floor(factor * size / side) * side for size in (height, width))
    if not tall:
        tall, wide = side, min(width // height, tokens) * side
    elif not wide:
        tall, wide = min(height // width, tokens) * side, side
    if max(tall, wide) > vision.positions * vision.patch:
        raise PromptError(f"{name} is too narrow, {width} x {height} pixels: cut it in pieces")
    return tall, wide


def on_white(picture: PIL.Image.Image) -> PIL.Image.Image:
    """The picture in RGB, transparent pixels over white; of 16-bit gray the upper 8 bits.

    Gray in 32 bits, mode "I", is 16-bit gray of some formats, or made of an array of integers. If none is above 255,
    it is 8-bit gray, as for Pillow's own conversion.
    """
    from PIL import Image as Pillow

    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    picture.load()
    if picture.mode == "I":
        extremes: Any = picture.getextrema()
        if extremes[1] <= 255:
            return picture.convert("RGB")
    made = Pillow.new("RGB", picture.size)
    for top in range(0, picture.height, STRIP):
        strip = picture.crop((0, top, picture.width, min(top + STRIP, picture.height)))
        made.paste(_strip_on_white(strip), (0, top))
    return made


def _strip_on_white(picture: PIL.Image.Image) -> PIL.Image.Image:
    from PIL import Image as Pillow

    if picture.mode.startswith("I"):
        gray = np.clip(np.asarray(picture).astype(np.int64), 0, 65535) >> 8
        return Pillow.fromarray(gray.astype(np.uint8)).convert("RGB")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layer = picture.convert("RGBA")
    return Pillow.alpha_composite(Pillow.new("RGBA", layer.size, (255, 255, 255)), layer).convert("RGB")
