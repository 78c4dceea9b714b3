"""The page at `/`: a chat in a browser, which loads everything from this server and talks to no other.

`page/vendor` has marked 18.2.1 (`lib/marked.umd.js`) and DOMPurify 3.4.18 (`dist/purify.min.js`) as npm has them, each
with its licence: the first formats replies, the second lets no tag or attribute through that the page does not list.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

NAMES = (
    "page.js",
    "api.js",
    "attachments.js",
    "store.js",
    "reply.js",
    "rendering.js",
    "sounds.js",
    "recorder.js",
    "page.css",
    "vendor/marked.js",
    "vendor/purify.js",
)
FILES = {"/": "index.html", **{f"/{name}": name for name in NAMES}}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """Routes of the page's files."""
    return [Route(path, _send) for path in FILES]


async def _send(request: Request) -> Response:
    name = FILES[request.url.path]
    return FileResponse(Path(__file__).parent / "page" / name, headers=HEADERS)
