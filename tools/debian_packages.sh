#!/usr/bin/env bash
# debian_packages.sh NAME...: install what is missing of the few packages that pip has none of. As root: with apt-get.
# Otherwise: say what to run. Looks for what the packages bring, so that other distributions' packages count as well.
set -eu -o pipefail

includes() {
  command -v "${CXX:-g++}" >/dev/null && "${CXX:-g++}" -E -x c++ -include "$1" /dev/null -o /dev/null 2>/dev/null
}

is_there() {
  case $1 in
    g++) command -v "${CXX:-g++}" >/dev/null ;;
    libzstd-dev) includes zstd.h ;;
    libssl-dev) includes openssl/sha.h ;;
    libgtest-dev) includes gtest/gtest.h ;;
    python3-venv) "${PYTHON:-python3}" -c 'import ensurepip, venv' 2>/dev/null ;;
    *) echo "$0: do not know how to look for $1" >&2; exit 2 ;;
  esac
}

missing=()
for name in "$@"; do is_there "$name" || missing+=("$name"); done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing Debian packages: ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null
  apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
  for name in "${missing[@]}"; do
    is_there "$name" || { echo "$name is installed, but what tk needs of it is still not found" >&2; exit 1; }
  done
else
  echo "tk needs Debian packages that are not installed, or the same from another distribution. Run:" >&2
  echo "    sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
