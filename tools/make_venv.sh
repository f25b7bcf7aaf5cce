#!/usr/bin/env bash
# make_venv.sh PYTHON FOLDER TORCH: a virtual environment; TORCH "system": one that also sees PYTHON's packages.
set -eu -o pipefail
python=$1 folder=$2 torch=$3
# The Makefile puts the folder first in PATH: a plain "python3" would become the one that is made here.
PATH=${PATH#"$folder/bin:"}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "tk needs Python 3.10 or newer; $python is $("$python" --version 2>&1). Choose another: make PYTHON=python3.11" >&2
  exit 1
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  PYTHON=$python "$(dirname "$0")/debian_packages.sh" python3-venv
fi
"$python" -m venv --clear "$folder"
if [ "$torch" = system ]; then
  # Not --system-site-packages: when PYTHON is itself of a virtual environment, that would leave out its packages.
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' >"$site/system.pth"
fi
