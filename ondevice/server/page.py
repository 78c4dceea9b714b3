"""The page at `/`: a chat in a browser, which loads everything from this server and talks to no other.

`page/vendor` has three libraries and a font as npm has them, each with its licence: marked 18.2.1
(`lib/marked.umd.js`), which splits Markdown into tokens; Temml 0.13.5 (`dist/temml.min.js`), which makes MathML of TeX,
with `dist/Temml-NotoSans.css`, without which browsers draw no lines over or through a formula; highlight.js 11.12.0
(`es/highlight.min.js` of @highlightjs/cdn-assets), which finds what gets a colour in code; and Noto Sans Math
(@fontsource/noto-sans-math 5.3.0) for machines without a font for math. The page loads marked when it is opened, the
others when a reply has math or code.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

NAMES = (
    "page.js",
    "api.js",
    "composer.js",
    "conversation.js",
    "rendering.js",
    "replies.js",
    "reply.js",
    "settings.js",
    "sidebar.js",
    "sounds.js",
    "store.js",
    "turns.js",
    "recorder.js",
    "page.css",
    "vendor/highlight.js",
    "vendor/marked.js",
    "vendor/noto-sans-math.woff2",
    "vendor/temml.css",
    "vendor/temml.js",
)
FILES = {"/": "index.html", **{f"/{name}": name for name in NAMES}}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "connect-src 'self'; img-src data: blob:; media-src blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
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
