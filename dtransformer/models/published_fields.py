"""Fields of published config files that do not change the network, grouped by purpose."""

import pathlib

from dtransformer.tables import read_table

FIELDS = read_table(pathlib.Path(__file__).with_suffix(".yaml"))
