#!/usr/bin/env bash
# The architecture that `tk build --arch` takes for this machine's first GPU: 80 serves all of 8.x, a cubin for 9.0 only
# that, and PTX what has no kernels of its own. Without a GPU: 90.
set -u
capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
case $capability in
  8.*) echo 80 ;;
  9.0 | "") echo 90 ;;
  10.0) echo 100 ;;
  *) echo ptx80 ;;
esac
