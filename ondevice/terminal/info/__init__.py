"""`ondevice info`."""
