"""The `ondevice` command."""
