"""Write the file of the embedded corpus: `python -m harness.corpus`."""

import lzma

from dtransformer.datasets import embedded
from harness.corpus.corpus import drawn_pairs

LINES = "".join(f"{english}\t{french}\n" for english, french in drawn_pairs(embedded.MAX_PAIRS))
embedded.FILE.write_bytes(lzma.compress(LINES.encode(), preset=9 | lzma.PRESET_EXTREME))
