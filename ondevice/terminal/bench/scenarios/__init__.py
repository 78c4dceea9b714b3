"""`ondevice bench --scenarios`: what drafts are worth by the kind of text."""
