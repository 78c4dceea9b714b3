"""The HTTP server: the APIs that clients know, over one model."""
