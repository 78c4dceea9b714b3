"""Hooks of `mkdocs.yml`: pages of the repository that lie outside docs/, and links that lead out of it.

The Markdown of all pages is written for readers of the repository. A link to a page of the site stays a link to it; one
to any other file of the repository leads to the file on GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]

OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/RESULTS.md": "results.md",
    **{
        f"benchmarks/results/{page.name}": f"results/{page.name}" for page in (ROOT / "benchmarks/results").glob("*.md")
    },
    "benchmarks/effect.svg": "effect.svg",
    "models/README.md": "reference-pair.md",
}
"""Files of the repository that are part of the site, and their paths in it."""

LINK = re.compile(r"(\]\()([^)\s#]+)?(#[^)\s]*)?(\))")


def on_files(files: Files, config: Any) -> Files:
    for source, path in OUTSIDE.items():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page, except in blocks of code."""
    source = next((own for own, path in OUTSIDE.items() if path == page.file.src_uri), f"docs/{page.file.src_uri}")

    def rewritten(link: re.Match[str]) -> str:
        target = link[2]
        if target is None or "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        repository = config["extra"]["social"][0]["link"]
        return f"{link[1]}{link_path(path, page.file.src_uri, repository)}{link[3] or ''}{link[4]}"

    blocks = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(blocks))


def link_path(path: str, page: str, repository: str) -> str:
    """Where a link to a file leads: within the site if the file is part of it, else to the repository's pages.

    Args:
        path: from the root of the repository.
        page: the path in the site of the page with the link.
    """
    own = OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if own is not None:
        return posixpath.relpath(own, posixpath.dirname(page) or ".")
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository}/{kind}/main/{path}"


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Check that a page loads nothing from other hosts; an error ends the build."""
    if foreign := re.search(r'\ssrc="https?://[^"]*"', output):
        raise PluginError(f"{page.file.src_uri} loads from another host:{foreign[0]}")
    return output
