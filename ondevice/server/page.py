"""The page at `/`: a chat in a browser, which asks this server and no other."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

FILES = {"/": "index.html", "/page.js": "page.js", "/page.css": "page.css"}

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each of its files."""
    return [Route(path, _send) for path in FILES]


async def _send(request: Request) -> Response:
    name = FILES[request.url.path]
    return FileResponse(Path(__file__).parent / "page" / name, headers=HEADERS)
