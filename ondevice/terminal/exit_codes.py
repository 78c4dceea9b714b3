"""What `ondevice` tells the shell, beyond 0."""

DIFFERENT = 1
"""A check that the user asked for failed."""

UNANSWERED = 1
"""Some lines of a batch have an error in the place of an answer."""

MISTAKE = 2
"""The user's, or the bundle's: one line on standard error says which."""

INTERRUPTED = 130
BROKEN_PIPE = 141
"""As shells report a program that SIGINT or SIGPIPE ended."""
