"""Structured output: replies that a grammar limits, through llguidance (the extra `[grammar]`)."""
