"""The towers of a bundle, for tests."""

from __future__ import annotations

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.interfaces import audio_interface, vision_interface
from ondevice.media.tower import Piece, Tower


def vision_tower(bundle: Bundle) -> Tower:
    vision = bundle.manifest.vision
    assert vision is not None
    return Tower(bundle, vision.graph, vision_interface(vision, bundle.manifest.target), 1)


def audio_tower(bundle: Bundle) -> Tower:
    audio = bundle.manifest.audio
    assert audio is not None
    return Tower(bundle, audio.graph, audio_interface(audio, bundle.manifest.target), 1)


def encoded(tower: Tower, piece: Piece) -> Float32Array:
    rows = tower.encode(piece)
    assert rows is not None
    return rows
