"""`python -m eldr` is the `eldr` command."""

import sys

from eldr.cli import main

sys.exit(main())
