"""The recipe's files import each other by their plain names, as the directory of a script allows."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "recipe"))
