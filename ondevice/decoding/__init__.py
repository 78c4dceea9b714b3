"""Tokens in, tokens out: sampling, verification, draft length, the loop. Nothing here knows what text is."""
