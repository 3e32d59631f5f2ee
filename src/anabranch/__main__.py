"""``python -m anabranch``: the same as the console command."""

import sys

from anabranch.tools.cli.main import main

sys.exit(main())
