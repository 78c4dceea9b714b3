"""The float32 graph of a checkpoint, as the reference that a bundle is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ondevice.bundle import Bundle
from ondevice.progress import Progress
from ondevice_export.exporter import export


@contextmanager
def reference_bundle(source: str, progress: Progress) -> Iterator[Bundle]:
    """A bundle with the weights of a checkpoint or GGUF file in float32, in a temporary directory.

    It takes 4 bytes per weight on the disk. ONNX Runtime maps the embedding tables, and reads the other weights into
    memory.

    Args:
        source: a directory, a GGUF file or a hub id.
        progress: called with the number of weights written so far and in total.

    Raises:
        CheckpointError: as `export`.
        OndeviceError: the temporary directory has too little space; `$TMPDIR` names another one.
    """
    with TemporaryDirectory(prefix="ondevice-reference-") as directory:
        out, none = Path(directory) / "reference", "none"
        export(source, out, drafter=none, heads=none, quantize=none, text_only=True, progress=progress)
        yield Bundle.open(out)
