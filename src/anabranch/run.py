"""``python -m anabranch.run``: the same as ``anabranch run``, for ``torchrun … -m anabranch.run train.py``."""

import sys

from anabranch.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
