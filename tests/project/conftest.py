from tests.server.browsing import browser

__all__ = ["browser"]
