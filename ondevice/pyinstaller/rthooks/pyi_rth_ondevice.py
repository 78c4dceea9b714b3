"""Runtime hook: PyInstaller runs it before the application's own code."""

import ondevice

ondevice.freeze_support()
