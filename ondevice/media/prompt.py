"""Puts pictures and sounds into a prompt: placeholders become soft tokens, which are encoded when a forward first needs
them.

A chat template writes one placeholder for a picture, a sound or a video. It becomes the token that begins it, the soft
tokens, and the token that ends it; a sound of more than 30 seconds becomes several such runs, and a video one for each
frame, with its time as text before it. In the prompt's ids a soft token is a negative number that follows from the
picture's pixels, or the sound's samples, and from its own index. So everything that compares ids, such as the cache of
sequences, tells pictures apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ondevice.bundle import Bundle
from ondevice.bundle_format.interfaces import audio_interface, vision_interface
from ondevice.errors import ContextOverflowError, PromptError
from ondevice.generate.request import SoftTokens
from ondevice.media.encoded import EncodedMedia
from ondevice.media.images import Picture
from ondevice.media.sounds import Sound
from ondevice.media.tower import Piece, Tower
from ondevice.media.videos import Frames
from ondevice.text.media_parts import Audio, Image, Media, Video
from ondevice.text.tokenizer import Tokenizer

_SIGN = np.int64(-(1 << 63))


class Medium(Protocol):
    """A picture, a sound or a video that was opened.

    counts : soft tokens of each piece, known before it is decoded
    """

    @property
    def counts(self) -> Sequence[int]: ...

    def pieces(self) -> Sequence[Piece]: ...


class Kind(NamedTuple):
    """Pictures and videos, or sounds: the token that stands for one, those around its soft tokens, what encodes it, and
    whether its soft tokens see each other (see `SoftTokens`).
    """

    parts: tuple[type[Media], ...]
    placeholder: int
    begin: int
    end: int
    tower: Tower
    is_block: bool = False


class MediaEncoder:
    """Encodes the pictures and sounds of a model's prompts. A tower is opened when it is first needed."""

    def __init__(
        self, bundle: Bundle, threads: int, cache_bytes: int, most_rows: int, tokenizer: Tokenizer | None = None
    ) -> None:
        """
        Args:
            bundle: the model's bundle, with at least one tower.
            threads: threads that the towers compute with.
            cache_bytes: bytes of encoded pictures and sounds to keep.
            most_rows: most rows of a forward, which limits a picture whose tokens see each other.
            tokenizer: its tokenizer, which encodes the times of a video's frames; for prompts with videos.
        """
        manifest = bundle.manifest
        self._vision, self._audio = vision, audio = manifest.vision, manifest.audio
        self._most_rows, self._tokenizer, self._encoded = most_rows, tokenizer, EncodedMedia(cache_bytes)
        self._kinds: list[Kind] = []
        if vision is not None:
            tower = Tower(bundle, vision.graph, vision_interface(vision, manifest.target), threads)
            tokens = vision.image_token_id, vision.begin_token_id, vision.end_token_id
            self._kinds.append(Kind((Image, Video), *tokens, tower, vision.bidirectional))
        if audio is not None:
            tower = Tower(bundle, audio.graph, audio_interface(audio, manifest.target), threads)
            self._kinds.append(Kind((Audio,), audio.audio_token_id, audio.begin_token_id, audio.end_token_id, tower))

    def insert(
        self, ids: Sequence[int], media: Sequence[Media], image_tokens: int | None, context_length: int
    ) -> tuple[list[int], list[SoftTokens]]:
        """The prompt with soft tokens, and what encodes them.

        All pictures and sounds are decoded, but none before all were found to fit.

        Args:
            ids: the prompt, with a placeholder for each picture and sound.
            media: these, in the order of the placeholders.
            image_tokens: the most soft tokens of a picture that does not choose itself; None takes the tower's number.
            context_length: the prompt must be shorter.

        Raises:
            PromptError: other placeholders than pictures and sounds, or one that cannot be read or is too large.
            ContextOverflowError: they do not fit into the context.
            UsageError: a number of tokens that is not possible.
            MissingDependencyError: Pillow, or a reader of the sound's format, is not installed.
        """
        opened = self._opened(ids, media, image_tokens, context_length)
        pieces = [medium.pieces() for medium in opened]
        made, spans = list[int](), list[SoftTokens]()
        for token, kind, number in self._numbered(ids):
            if kind is None:
                made.append(token)
                continue
            for piece, label in zip(pieces[number], self._labels(opened[number]), strict=True):
                made += label
                digest = piece.digest()
                encode = partial(self._encoded.rows, digest, partial(kind.tower.encode, piece))
                made.append(kind.begin)
                spans.append(SoftTokens(len(made), piece.tokens, encode, kind.is_block))
                made += soft_ids(digest, piece.tokens)
                made.append(kind.end)
        return made, spans

    def counted(
        self, ids: Sequence[int], media: Sequence[Media], image_tokens: int | None, context_length: int
    ) -> list[int]:
        """The prompt with as many placeholders for each picture and sound as it has soft tokens; WAV files and pictures
        are not decoded.

        The arguments and errors are those of `insert`.
        """
        opened = self._opened(ids, media, image_tokens, context_length)
        made = list[int]()
        for token, kind, number in self._numbered(ids):
            if kind is None:
                made.append(token)
            else:
                for count, label in zip(opened[number].counts, self._labels(opened[number]), strict=True):
                    made += [*label, kind.begin, *[token] * count, kind.end]
        return made

    def forget(self) -> None:
        """Drop all encoded pictures and sounds."""
        self._encoded.forget()

    def _numbered(self, ids: Sequence[int]) -> Iterator[tuple[int, Kind | None, int]]:
        """Each token; if it is a placeholder, its kind, and the number of the placeholders before it."""
        kinds = {kind.placeholder: kind for kind in self._kinds}
        number = 0
        for token in ids:
            kind = kinds.get(token)
            yield token, kind, number
            number += kind is not None

    def _opened(
        self, ids: Sequence[int], media: Sequence[Media], image_tokens: int | None, context_length: int
    ) -> list[Medium]:
        """The pictures and sounds with their headers read, all of which fit into the context."""
        kinds = [kind for _, kind, _ in self._numbered(ids) if kind is not None]
        if len(kinds) != len(media) or not all(map(isinstance, media, [kind.parts for kind in kinds])):
            raise PromptError(
                f"the prompt has {len(kinds)} placeholders for {len(media)} pictures and sounds, or of another kind: "
                "these belong into the messages of users, as parts of their content"
            )
        length, opened = len(ids), list[Medium]()
        for number, (medium, kind) in enumerate(zip(media, kinds, strict=True), 1):
            opened.append(self._open(medium, image_tokens, number))
            counts = opened[-1].counts
            length += sum(counts) + 2 * len(counts) - 1 + sum(map(len, self._labels(opened[-1])))
            if length >= context_length:
                raise ContextOverflowError(length, context_length, counted=number == len(media))
            if kind.is_block and max(counts) > self._most_rows:
                raise PromptError(
                    f"picture {number} takes {max(counts)} tokens, which this model reads at once, and this engine "
                    f"reads at most {self._most_rows}: use image_tokens=280, or fewer"
                )
        return opened

    def _open(self, medium: Media, image_tokens: int | None, number: int) -> Medium:
        if isinstance(medium, Audio):
            assert self._audio is not None
            return Sound(medium, self._audio, f"sound {number}")
        assert self._vision is not None
        if isinstance(medium, Video):
            return Frames(medium, self._vision, f"video {number}")
        return Picture(medium, self._vision, image_tokens, f"picture {number}")

    def _labels(self, medium: Medium) -> list[list[int]]:
        """The tokens of the text before each piece: the time of a video's frame, nothing for others."""
        if not isinstance(medium, Frames):
            return [[] for _ in medium.counts]
        assert self._tokenizer is not None
        return [self._tokenizer.encode(label, add_special_tokens=False) for label in medium.labels]


def soft_ids(digest: bytes, count: int) -> list[int]:
    """The numbers of a piece's soft tokens: negative, and different for each index of each piece."""
    numbers = np.frombuffer(hashlib.shake_256(digest).digest(8 * count), "<i8")
    made: list[int] = (numbers | _SIGN).tolist()
    return made
