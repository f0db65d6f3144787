"""``python -m headwise``: the command line without its script."""

import sys

from headwise.cli import main

sys.exit(main())
