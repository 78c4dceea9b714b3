"""The command line. The only layer that prints."""
