"""Write the sample's two files from WMT14's newstest2014, French and English.

python examples/wmt14/preprocess.py --source FOLDER-OR-ARCHIVE --out data/wmt14
python examples/wmt14/preprocess.py --download --out data/wmt14
"""

import argparse
import sys

from dtransformer.datasets import wmt14
from dtransformer.errors import InputError

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--source", help="a folder, or a tar archive, with the two .sgm files")
parser.add_argument("--download", action="store_true", help="download the official archive")
parser.add_argument("--out", default="data/wmt14")
parser.add_argument("--overwrite", action="store_true", help="replace files of other content")
args = parser.parse_args()
if bool(args.source) == args.download:
    parser.error("give either --source or --download")

try:
    source = wmt14.download(args.out, overwrite=args.overwrite) if args.download else args.source
    for path in wmt14.prepare(source, args.out, args.overwrite):
        print(path)
except InputError as error:
    sys.exit(f"preprocess.py: {error}")
