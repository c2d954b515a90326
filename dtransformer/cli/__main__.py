"""Lets `python -m dtransformer.cli` run the command line."""

import sys

from dtransformer.cli import main

sys.exit(main())
