"""Runs before a frozen application's own code."""

import ondevice

ondevice.freeze_support()
