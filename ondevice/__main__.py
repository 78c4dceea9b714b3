"""`python -m ondevice` runs the command `ondevice`."""

import sys

from ondevice.cli.main import main

sys.exit(main())
