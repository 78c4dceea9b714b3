"""How far a batch is."""

from __future__ import annotations

from time import perf_counter

from ondevice.terminal.progress_bar import ProgressBar


class BatchBar(ProgressBar):
    """Prompts that are answered, tokens per second, and the time that is left at this pace."""

    def __init__(self, total: int) -> None:
        """
        Args:
            total: prompts to answer.
        """
        super().__init__(
            "batch",
            bar_format="{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}, {remaining} left{postfix}",
            smoothing=0.0,  # long answers come seldom: the mean says more than the newest
            miniters=0,  # tokens come between them
            mininterval=0.25,
        )
        self._total = total
        self._started = perf_counter()
        self.answers = 0
        self.tokens = 0

    @property
    def seconds(self) -> float:
        return perf_counter() - self._started

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def count(self, answers: int, tokens: int) -> None:
        """So many more."""
        self.answers += answers
        self.tokens += tokens
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.tokens_per_s:.1f} tokens/s", refresh=False)
        self.show(self.answers, self._total)
