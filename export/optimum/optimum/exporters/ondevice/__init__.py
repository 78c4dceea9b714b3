"""Export to ondevice bundles: what runs Gemma 4 on CPUs with multi-token drafts."""

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
    """Export a Gemma 4 checkpoint, and its MTP drafter, to a bundle directory. Torch is not needed.

    Args:
        model_name_or_path: a hub id or a directory.
        output: where the bundle goes. An older bundle there is replaced at the very end.
        drafter: `auto` finds `<id>-assistant` on the hub, or `drafter/` beside a directory; `none`; or a source.
        heads: `auto` finds `heads/` beside a directory; `none`; or a directory of heads trained for the model.
        quantize: width of the weights: `int4`, `int8` or `none`.
        head_bits: width of the token table that the head and the embedding share: 4 or 8.
        revision: branch, tag or commit of the model on the hub.

    Returns:
        The bundle's directory, for `ondevice.load`.

    Raises:
        ondevice.OndeviceError: what a user can mend, in one line.
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
