"""Where the tests run."""

import os

DEVICE = os.environ.get("TK_TEST_DEVICE", "cuda")
