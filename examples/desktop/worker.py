"""Runs the window's model in a thread of its own and reports progress and text by Qt signals."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from time import perf_counter
from typing import Any

from PySide6.QtCore import QObject, Signal

import ondevice

BATCH_S = 0.05
"""Minimum time between two updates of the text: drawing every token by itself takes more CPU time than the model."""


class StoppedError(Exception):
    """Raised in a callback of the model to end the running operation."""


class Worker(QObject):
    """One model and one conversation. One operation runs at a time; all methods except `close` return at once."""

    progress = Signal(str, float)  # the running stage, and the share of it that is done, 0 to 1
    said = Signal(str, str, str)  # text added to the answer, text added to the thoughts, the figures so far
    ended = Signal(str)  # the operation has ended; one line for the status bar, such as an error

    def __init__(self) -> None:
        super().__init__()
        self._model: ondevice.Model | None = None
        self._messages: list[dict[str, Any]] = []
        self._thread = Thread()
        self._stopped = False

    def open(self, bundle: str) -> None:
        self._begin(lambda: self._open(bundle))

    def download(self, repository: str) -> None:
        """Get a bundle from the hub and open it. A download that was stopped continues where it ended."""
        self._begin(lambda: self._open(str(ondevice.pull(repository, on_progress=self._receive, replace=True))))

    def ask(self, text: str, think: bool) -> None:
        self._begin(lambda: self._answer(text, think))

    def stop(self) -> None:
        """End the running operation: a reply ends within one forward, also while its prompt is read."""
        self._stopped = True
        if self._model is not None:
            self._model.cancel()

    def close(self) -> None:
        """End the running operation, close the model, and return when both are done."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        if self._model is not None:
            self._model.close()

    def _begin(self, work: Callable[[], str]) -> None:
        self._stopped = False
        self._thread = Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], str]) -> None:
        line = "this application has a fault"
        try:
            line = work()
        except StoppedError:
            line = "stopped"
        except (ondevice.OndeviceError, OSError, MemoryError) as error:
            line = str(error) or "there is not enough memory"
        finally:
            self.ended.emit(line)

    def _open(self, bundle: str) -> str:
        if self._model is not None:
            self._model.close()
        self._model, self._messages = None, []
        self._model = ondevice.load(bundle, on_prepare=self._tell)
        return f"{self._model.manifest.name} is ready"

    def _answer(self, text: str, think: bool) -> str:
        if self._model is None:
            raise ondevice.UsageError("choose a bundle first")
        asked = [*self._messages, {"role": "user", "content": text}]
        steps: list[ondevice.Step] = []
        shown, since = 0, 0.0
        with self._model.stream(asked, thinking=think, max_new_tokens=2048, on_prefill=self._read) as generation:
            for step in generation:
                steps.append(step)
                if perf_counter() - since > BATCH_S or step.finish_reason:
                    batch = ondevice.Reply.of(steps[shown:], generation.stats)
                    self.said.emit(batch.text, batch.reasoning, figures(batch.stats))
                    shown, since = len(steps), perf_counter()
        reply = ondevice.Reply.of(steps, generation.stats)
        if reply.token_ids:  # empty if it was stopped before its first token
            self._messages = [*asked, reply.message]
        return f"{figures(reply.stats)}, {reply.finish_reason}"

    def _receive(self, done: int, total: int) -> None:
        self._tell(f"downloading, {done / 1e9:.2f} of {total / 1e9:.2f} GB", done / max(total, 1))

    def _read(self, done: int, total: int) -> None:
        self._tell("reading", done / total)

    def _tell(self, stage: str, share: float) -> None:
        if self._stopped:
            raise StoppedError
        self.progress.emit(stage, share)


def figures(stats: ondevice.Stats) -> str:
    """One line with the decoding speed, how many drafted tokens were accepted, and the memory used at most."""
    speed = f"{stats.decode_tokens_per_s:.0f} tokens/s, {stats.accepted} of {stats.drafted} drafted tokens accepted"
    return f"{speed}, {stats.peak_rss_bytes / 1e9:.2f} GB" if stats.peak_rss_bytes else speed
