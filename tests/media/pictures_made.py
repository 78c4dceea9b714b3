"""Pictures of known pixels, and the files that tests read them from."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    """Smooth random pixels, uint8[height, width, channels]: resampling matters, and JPEG keeps most of them."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 7 + 2, width // 7 + 2, channels))
    rows, columns = np.arange(height) / 7, np.arange(width) / 7
    top, left = rows.astype(int), columns.astype(int)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    upper = coarse[top][:, left] * (1 - right) + coarse[top][:, left + 1] * right
    lower = coarse[top + 1][:, left] * (1 - right) + coarse[top + 1][:, left + 1] * right
    return (upper * (1 - down) + lower * down).astype(np.uint8)


def saved(picture: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file."""
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def png(height: int = 60, width: int = 80, seed: int = 0) -> bytes:
    return saved(PIL.Image.fromarray(noise(height, width, seed=seed)))
