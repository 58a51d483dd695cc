"""Run the command `instep` by `python -m instep`."""

import sys

from instep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
