"""`python -m instep`: the `instep` command."""

import sys

from instep.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
