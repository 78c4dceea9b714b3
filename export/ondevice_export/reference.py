"""The float32 graph of a checkpoint, as the reference that a bundle is compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ondevice.bundle import Bundle
from ondevice.progress import Progress
from ondevice_export.checkpoint.models import open_target
from ondevice_export.checkpoint.source import locate
from ondevice_export.export_options import ExportOptions
from ondevice_export.exporter import write

_log = logging.getLogger(__name__)


@contextmanager
def reference_bundle(source: str, progress: Progress, context: int) -> Iterator[Bundle]:
    """A bundle with the weights of a checkpoint or GGUF file in float32, in a temporary directory.

    It takes 4 bytes per weight on the disk. ONNX Runtime maps the embedding tables, and reads the other weights into
    memory.

    Args:
        source: a directory, a GGUF file or a hub id.
        progress: called with the number of weights written so far and in total.
        context: the longest text of the bundle that is compared, so that a model with `longrope` has the frequencies of
            that bundle. A model with shorter texts keeps its own length.

    Raises:
        CheckpointError: as `export`.
        OndeviceError: the temporary directory has too little space; `$TMPDIR` names another one.
    """
    with TemporaryDirectory(prefix="ondevice-reference-") as directory:
        out = Path(directory) / "reference"
        with open_target(locate(source), _log.info, text_only=True, context=context) as target:
            write(target, None, None, out, ExportOptions(quantize="none"), progress=progress)
        yield Bundle.open(out)
