"""`ondevice bench`: every drafter and draft length beside plain decoding."""
