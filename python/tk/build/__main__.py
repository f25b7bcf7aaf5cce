"""``TK_NO_LIBRARY=1 python -m tk.build``: ``tk build`` before there is a library to load, as CMake runs it."""

import argparse
import sys

from tk.cli.build import DESCRIPTION, add_arguments, run

parser = argparse.ArgumentParser(
    prog="python -m tk.build", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
)
add_arguments(parser)
args = parser.parse_args()
args.all = args.all or not args.files
sys.exit(run(args))
