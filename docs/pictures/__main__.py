"""Draw the pictures of the docs into docs/images.

python docs/pictures
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import charts
import diagrams
import measured
import sharding

diagrams.draw_all()
charts.draw_all()
measured.draw_all()
sharding.draw_all()
