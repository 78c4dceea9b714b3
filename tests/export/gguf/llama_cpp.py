"""Token ids of llama.cpp, in a process of its own:

python -m tests.export.gguf.llama_cpp FILE < texts.json > ids.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def token_ids(model: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text, with control tokens read as such and the begin token that the file asks for."""
    command = [sys.executable, "-m", "tests.export.gguf.llama_cpp", str(model)]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, cwd=root, check=True)
    ids: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return ids


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.cpuparams.n_threads = sys.argv[1], 64, False, 1
    server = xllamacpp.Server(params)

    def tokenize(text: str) -> Any:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(
            f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    ids = [tokenize(text) for text in json.load(sys.stdin)]
    sys.stdout.write(f"\n{json.dumps(ids)}\n")
    sys.stdout.flush()
    os._exit(0)  # the server's threads would keep the process


if __name__ == "__main__":
    main()
