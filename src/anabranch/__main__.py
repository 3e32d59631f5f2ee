"""``python -m anabranch``: the same as the console command."""

import sys

from anabranch.cli.main import main

sys.exit(main())
