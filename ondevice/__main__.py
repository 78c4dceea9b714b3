"""`python -m ondevice` is `ondevice`."""

import sys

from ondevice.terminal.main import main

sys.exit(main())
