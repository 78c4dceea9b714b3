"""Puts pictures into a prompt: placeholders become soft tokens, which are encoded when a forward first needs them.

A chat template writes one placeholder for a picture. It becomes the token that begins a picture, the soft tokens, and
the token that ends it. In the prompt's ids a soft token is a negative number that follows from the picture's pixels and
from its own index. So everything that compares ids, such as the cache of sequences, tells pictures apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ondevice.bundle import Bundle
from ondevice.bundle_format.vision import VisionEntry
from ondevice.errors import ContextOverflowError, PromptError
from ondevice.generate.request import SoftTokens
from ondevice.media.encoded import EncodedMedia
from ondevice.media.images import Picture
from ondevice.media.tower import VisionTower
from ondevice.text.pictures import Image

_SIGN = np.int64(-(1 << 63))


class MediaEncoder:
    """Encodes the pictures of a model's prompts. The tower is opened when the first picture is encoded."""

    def __init__(self, bundle: Bundle, vision: VisionEntry, threads: int, cache_bytes: int) -> None:
        """
        Args:
            bundle: the model's bundle.
            vision: its tower.
            threads: threads that the tower computes with.
            cache_bytes: bytes of encoded pictures to keep.
        """
        self._vision = vision
        self._encoded = EncodedMedia(cache_bytes)
        self._tower = VisionTower(bundle, vision, threads)

    def insert(
        self, ids: Sequence[int], images: Sequence[Image], tokens: int | None, context_length: int
    ) -> tuple[list[int], list[SoftTokens]]:
        """The prompt with soft tokens, and what encodes them.

        All pictures are decoded, but none before all were found to fit.

        Args:
            ids: the prompt, with a placeholder for each picture.
            images: the pictures, in the order of the placeholders.
            tokens: the most soft tokens of a picture that does not choose itself; None takes the tower's number.
            context_length: the prompt must be shorter.

        Raises:
            PromptError: other placeholders than pictures, or a picture that cannot be read or is too large.
            ContextOverflowError: the pictures do not fit into the context.
            UsageError: a number of tokens that is not possible.
            MissingDependencyError: Pillow is not installed.
        """
        pixels = [picture.pixels() for picture in self._opened(ids, images, tokens, context_length)]
        made, spans = list[int](), list[SoftTokens]()
        for token, number in self._numbered(ids):
            if number is None:
                made.append(token)
                continue
            own = pixels[number]
            made.append(self._vision.begin_token_id)
            digest = own.digest()
            spans.append(
                SoftTokens(len(made), own.tokens, partial(self._encoded.rows, digest, partial(self._tower.encode, own)))
            )
            made += soft_ids(digest, own.tokens)
            made.append(self._vision.end_token_id)
        return made, spans

    def counted(
        self, ids: Sequence[int], images: Sequence[Image], tokens: int | None, context_length: int
    ) -> list[int]:
        """The prompt with as many placeholders for each picture as it has soft tokens; no picture is decoded.

        The arguments and errors are those of `insert`.
        """
        pictures = self._opened(ids, images, tokens, context_length)
        made = list[int]()
        for token, number in self._numbered(ids):
            if number is None:
                made.append(token)
            else:
                made += [self._vision.begin_token_id, *[token] * pictures[number].tokens, self._vision.end_token_id]
        return made

    def forget(self) -> None:
        """Drop all encoded pictures."""
        self._encoded.forget()

    def _numbered(self, ids: Sequence[int]) -> Iterator[tuple[int, int | None]]:
        """Each token, with the number of its picture if it is a placeholder."""
        number = 0
        for token in ids:
            if token == self._vision.image_token_id:
                yield token, number
                number += 1
            else:
                yield token, None

    def _opened(
        self, ids: Sequence[int], images: Sequence[Image], tokens: int | None, context_length: int
    ) -> list[Picture]:
        """The pictures with their headers read, all of which fit into the context."""
        places = sum(token == self._vision.image_token_id for token in ids)
        if places != len(images):
            raise PromptError(
                f"the prompt has {places} placeholders for {len(images)} pictures: pictures belong into the messages "
                "of users, as parts of their content"
            )
        length, opened = len(ids), []
        for number, image in enumerate(images, 1):
            opened.append(Picture(image, self._vision, tokens, f"picture {number}"))
            length += opened[-1].tokens + 1
            if length >= context_length:
                raise ContextOverflowError(length, context_length, counted=number == len(images))
        return opened


def soft_ids(digest: bytes, count: int) -> list[int]:
    """The numbers of a picture's soft tokens: negative, and different for each index of each picture."""
    numbers = np.frombuffer(hashlib.shake_256(digest).digest(8 * count), "<i8")
    made: list[int] = (numbers | _SIGN).tolist()
    return made
