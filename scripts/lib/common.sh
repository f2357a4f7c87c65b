# Shared by every script: where things live, and how to report what happens. Usage: . scripts/lib/common.sh
# Owns names of folders; does not own any process.

# `pipefail`: so nothing here ends in `| grep -q`, which leaves before it has read all. Who writes then dies, and a find is taken for none.
set -euo pipefail

TOP=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CACHE=${STREAM_S3_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rabbitmq-stream-s3}
export TOP CACHE
# The Debian release that carries RabbitMQ 4.3 and a RADOS gateway with atomic conditional writes.
HOST_SUITE=${STREAM_S3_HOST_SUITE:-forky}
mkdir -p "$CACHE"

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
die() { say "error: $*"; exit 1; }

# need PROGRAM PACKAGE: installs PACKAGE if PROGRAM is not there (root on Debian).
need() {
  command -v "$1" >/dev/null 2>&1 && return 0
  [ "$(id -u)" = 0 ] || die "$1 is missing: install the package $2 (or run as root)"
  say "installing $2"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null 2>&1 || {
    apt-get update -qq >/dev/null
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$2" >/dev/null
  }
}

# claim_target DIR: makes the shared build folder this checkout's. Cargo tells stale from fresh by file times alone and does not
# tell checkouts apart: without this, one could be tested with what another, built later, has left there.
claim_target() {
  local claim=$1/.checkout
  [ "$(cat "$claim" 2>/dev/null || true)" = "$TOP" ] && return 0
  mkdir -p "$1"
  find "$TOP/native" -name '*.rs' -exec touch {} +
  printf '%s\n' "$TOP" >"$claim"
}
