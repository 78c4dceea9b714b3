"""`python -m optimum.exporters.ondevice -m MODEL OUT`."""

from __future__ import annotations

import argparse

from optimum.commands.export.ondevice import add_arguments, export


def main() -> None:
    parser = argparse.ArgumentParser("python -m optimum.exporters.ondevice")
    add_arguments(parser)
    export(parser.parse_args())


if __name__ == "__main__":
    main()
