"""Fields of files beside published weights that no network is made of, as data, by what they say."""

import pathlib

from dtransformer.tables import read_table

FIELDS = read_table(pathlib.Path(__file__).with_suffix(".yaml"))
