"""The program `askew`, which is also `python -m askew`."""

from __future__ import annotations

import sys

from .core.signals import defer_signals


def main() -> int:
    """Load the command line and run it; a Ctrl-C while it is loaded ends the program once it is."""
    try:
        with defer_signals():
            from .cli.main import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
