"""Exports to bundles of ondevice, an inference runtime for Gemma 4 on CPUs with multi-token drafts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["main_export"]


def main_export(
    model_name_or_path: str | Path,
    output: str | Path,
    *,
    drafter: str = "auto",
    heads: str = "auto",
    quantize: str = "int4",
    head_bits: int = 8,
    revision: str | None = None,
) -> Path:
    """Export a Gemma 4 checkpoint and its MTP drafter to a bundle directory. Torch is not needed.

    Args:
        model_name_or_path: the checkpoint's hub id or directory.
        output: the bundle's directory. An older bundle there is replaced after the new one is complete.
        drafter: `auto` (`<id>-assistant` on the hub, or `drafter/` next to a directory), `none`, a hub id or directory.
        heads: `auto` (`heads/` next to a directory), `none`, or a directory of heads trained for the model.
        quantize: weight format: `int4`, `int4-affine`, `int4-table`, `int8` or `none`.
        head_bits: bits per weight of the token table that head and embedding share: 4 or 8.
        revision: branch, tag or commit of the model on the hub.

    Returns:
        The bundle's directory, for `ondevice.load`.

    Raises:
        ondevice.OndeviceError: a problem that the user can fix; the message is one line.
    """
    from ondevice_export import export

    return export(
        model_name_or_path,
        output,
        drafter=drafter,
        heads=heads,
        quantize=quantize,
        head_bits=head_bits,
        revision=revision,
    )
