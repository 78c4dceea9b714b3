"""What answers on another machine of a Ray cluster, in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice import __version__
from ondevice.bundle import Bundle
from ondevice.errors import OndeviceError
from ondevice.terminal.batch.answer import Answer, answer

if TYPE_CHECKING:
    from ondevice.model import Model
    from ondevice.terminal.batch.request import Request


class RemoteModel:
    """A Ray actor. `load` once, then `answer` from as many threads as there are places."""

    def __init__(self) -> None:
        self._model: Model

    def load(self, location: str, content: str, version: str, options: dict[str, Any]) -> str | None:
        """
        Args:
            location: of the bundle, a path or a name.
            content: of the bundle that is meant; the one here is compared with it in every byte.
            version: of ondevice where the batch was started.
            options: of `ondevice.load`.

        Returns:
            Why this machine cannot give the answers that the others give; None where it can.
        """
        import ondevice

        if version != __version__:
            return f"it has ondevice {__version__} and not {version}: install the same"
        try:
            found = Bundle.open(location, verify_hashes=True)
            if found.content != content:
                return f"its {location} is another bundle: copy it there again"
            self._model = ondevice.load(found.path, **options)
        except OndeviceError as error:  # not all of them can be sent to another process
            return str(error)
        return None

    def answer(self, request: Request) -> Answer | None:
        return answer(self._model, request)
