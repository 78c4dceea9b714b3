"""Which part of the target a row passes: all of it, or, for a draft, sub-layers left out and perhaps an early end."""

from __future__ import annotations

from dataclasses import dataclass

from ondevice.manifest import Target


@dataclass(frozen=True)
class LayerPath:
    """The way of a row from its embedding to its outputs. Per-layer embeddings and scalars of layers always count.

    without_attention, without_mlp : layers whose attention, or feed-forward block, adds nothing
    stop : layers from this one on are left out, and so are the final norm and the head: the output is the residual
        stream. None: all of them run.
    """

    without_attention: frozenset[int] = frozenset()
    without_mlp: frozenset[int] = frozenset()
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        return self == WHOLE

    def below(self, layer: int) -> LayerPath:
        """What of it lies before a layer: rows that have passed the same there have the same residual stream."""
        attention = frozenset(index for index in self.without_attention if index < layer)
        return LayerPath(attention, frozenset(index for index in self.without_mlp if index < layer), layer)

    def check(self, target: Target) -> None:
        """
        Raises:
            ValueError: layers that the target does not have, or a cache that other layers read left unwritten.
        """
        count = len(target.layers)
        if self.stop is not None and not 0 < self.stop <= count:
            raise ValueError(f"a path ends at a layer from 1 to {count}, not {self.stop}")
        if unknown := sorted(index for index in self.without_attention | self.without_mlp if not 0 <= index < count):
            raise ValueError(f"there are layers 0 to {count - 1}, and no {unknown[0]}")
        read = {layer.kv_source for index, layer in enumerate(target.layers) if layer.kv_source != index}
        if needed := sorted(self.without_attention & read):
            raise ValueError(f"the attention of layer {needed[0]} cannot be left out: other layers read its cache")


WHOLE = LayerPath()
