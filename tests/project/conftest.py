from tests.server.page.browsing import browser

__all__ = ["browser"]
