"""``TK_NO_LIBRARY=1 python -m tk.aot``: ``tk build`` before there is a library to load, as CMake runs it."""

import argparse
import sys

from tk.cli.build import DESCRIPTION, add_arguments, run

parser = argparse.ArgumentParser(
    prog="python -m tk.aot", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
)
add_arguments(parser)
parser.set_defaults(all=True)
sys.exit(run(parser.parse_args()))
