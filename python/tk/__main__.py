"""``python -m tk``."""

import sys

from tk.cli import main

sys.exit(main())
