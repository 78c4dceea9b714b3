"""Between strings and token ids. Nothing here knows an engine or a terminal."""
