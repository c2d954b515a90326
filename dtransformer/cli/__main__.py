"""Run the command line with `python -m dtransformer.cli`."""

import sys

from dtransformer.cli import main

sys.exit(main())
