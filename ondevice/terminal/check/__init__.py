"""`ondevice check`: the proof that drafts change nothing."""
