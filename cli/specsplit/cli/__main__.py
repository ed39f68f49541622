"""`python -m specsplit.cli`: the command for callers that know the interpreter but not where scripts lie."""

import sys

from specsplit.cli.main import main

sys.exit(main())
