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
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from ondevice.arrays import Float32Array
from ondevice.bundle import Bundle
from ondevice.bundle_format.interfaces import audio_interface, vision_interface
from ondevice.errors import ContextOverflowError, PromptError
from ondevice.generate.request import SoftTokens
from ondevice.media.encoded import Cancelled, EncodedMedia, RecentlyUsed
from ondevice.media.images import Picture
from ondevice.media.sounds import Sound
from ondevice.media.tower import MediaPiece, Tower
from ondevice.media.videos import Frames
from ondevice.text.media_parts import Audio, Image, Media, Video
from ondevice.text.tokenizer import Tokenizer

MAX_DECODED = 1 << 28
"""Most pixels of pictures and samples of sounds, of all channels, that a prompt may have in sum, by the headers of its
files. The time to decode them is in proportion to these, not to bytes or tokens, and a small file may have many. Five
of the largest pictures, 22 photos of 12 million pixels, or 46 minutes in stereo at 48 kHz are possible.
"""

MAX_KNOWN = 4096
"""Pieces of files whose digests are remembered, in about 1.5 MB."""

_SIGN = np.int64(-(1 << 63))


class Medium(Protocol):
    """A picture, a sound or a video whose header was read.

    counts : soft tokens of each piece, by its header
    size : pixels, or samples of all channels, that are decoded for all pieces
    file_bytes : length of the file that a piece can be decoded from at any time; None if what it comes from is the
        caller's, and may change
    """

    @property
    def counts(self) -> Sequence[int]: ...

    @property
    def size(self) -> int: ...

    @property
    def file_bytes(self) -> int | None: ...

    def piece(self, index: int) -> MediaPiece | None:
        """Decode a piece. It is None, or has other tokens than `counts` says, if the header is wrong about it."""
        ...

    def identity(self) -> bytes | None:
        """Identifies all pieces: the file, and how it is decoded; None if what it comes from may change."""
        ...


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
        self._known: RecentlyUsed[tuple[bytes, int], tuple[bytes, int]] = RecentlyUsed(MAX_KNOWN)
        """Digest and number of soft tokens by the identity of a medium and the number of a piece of it, so that a file
        is decoded for its first prompt only: every turn of a chat has the pictures of all earlier ones, and a photo of
        12 million pixels takes 0.3 s."""
        self._decoding = threading.Lock()
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

        Pictures and sounds that no earlier prompt had are decoded, but none before all were found to fit, and one at a
        time, whichever prompts they are of. A decoded piece that is smaller than its file is kept until the prompt is
        forgotten; another one is decoded again when it is encoded. So a prompt takes no more memory than its files.

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
        made, spans = list[int](), list[SoftTokens]()
        for token, kind, number in self._numbered(ids):
            if kind is None:
                made.append(token)
                continue
            medium = opened[number]
            identity = medium.identity()
            for index, label in enumerate(self._labels(medium)):
                encode = partial(self._decode_and_encode, kind.tower, medium, index)
                known = None if identity is None else self._known.get((identity, index))
                if known is None:
                    piece = self._decoded(medium, index)
                    known = (piece.digest(), piece.tokens) if piece is not None else (b"", 0)
                    if identity is not None:
                        self._known.keep((identity, index), known)
                    if piece is not None and _is_worth_keeping(piece, medium):
                        encode = partial(kind.tower.encode, piece)
                digest, tokens = known
                if not tokens:
                    continue
                made += label
                made.append(kind.begin)
                spans.append(SoftTokens(len(made), tokens, partial(self._encoded.rows, digest, encode), kind.is_block))
                made += soft_ids(digest, tokens)
                made.append(kind.end)
        if len(made) >= context_length:  # a header was wrong
            raise ContextOverflowError(len(made), context_length, counted=True)
        return made, spans

    def counted(
        self, ids: Sequence[int], media: Sequence[Media], image_tokens: int | None, context_length: int
    ) -> list[int]:
        """The prompt with as many placeholders for each picture and sound as it has soft tokens, by the headers of the
        files: nothing is decoded.

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
        """Drop all encoded pictures and sounds, and what is known of their files."""
        self._encoded.forget()
        self._known.forget()

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
        length, decoded, opened = len(ids), 0, list[Medium]()
        for number, (medium, kind) in enumerate(zip(media, kinds, strict=True), 1):
            opened.append(self._open(medium, image_tokens, number))
            counts = opened[-1].counts
            length += sum(counts) + 2 * len(counts) - 1 + sum(map(len, self._labels(opened[-1])))
            decoded += opened[-1].size
            if decoded > MAX_DECODED:
                raise PromptError(
                    f"the first {number} pictures and sounds have {decoded:,} pixels and samples in sum: "
                    f"{MAX_DECODED:,} are possible in a prompt"
                )
            if length >= context_length:
                raise ContextOverflowError(length, context_length, counted=number == len(media))
            if kind.is_block and max(counts) > self._most_rows:
                raise PromptError(
                    f"picture {number} takes {max(counts)} tokens, which this model reads at once, and this engine "
                    f"reads at most {self._most_rows}: use image_tokens=280, or fewer"
                )
        return opened

    def _decoded(self, medium: Medium, index: int) -> MediaPiece | None:
        """A piece; one is decoded at a time."""
        with self._decoding:
            return medium.piece(index)

    def _decode_and_encode(self, tower: Tower, medium: Medium, index: int, cancelled: Cancelled) -> Float32Array | None:
        piece = self._decoded(medium, index)
        assert piece is not None, "it was decoded before"
        return tower.encode(piece, cancelled)

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


def _is_worth_keeping(piece: MediaPiece, medium: Medium) -> bool:
    """Whether a piece cannot be decoded again, or all of them take no more memory than the file."""
    return medium.file_bytes is None or piece.nbytes * len(medium.counts) <= medium.file_bytes


def soft_ids(digest: bytes, count: int) -> list[int]:
    """The numbers of a piece's soft tokens: negative, and different for each index of each piece."""
    numbers = np.frombuffer(hashlib.shake_256(digest).digest(8 * count), "<i8")
    made: list[int] = (numbers | _SIGN).tolist()
    return made
