# Where the stock host (RabbitMQ 4, OTP, rebar3) is: on this machine, or in a root of our own.
# Usage: . scripts/lib/common.sh; . scripts/lib/host.sh. Owns that decision; starts nothing.

# Prints the folder of a RabbitMQ 4 installed on this very machine (the one that holds sbin/ and plugins/).
system_rabbitmq_home() {
  local home server
  for home in "${RABBITMQ_HOME:-}" /usr/lib/rabbitmq/lib/rabbitmq_server-4.* /opt/rabbitmq /usr/local/rabbitmq; do
    [ -n "$home" ] && ls -d "$home"/plugins/rabbit-4.* >/dev/null 2>&1 && { echo "$home"; return 0; }
  done
  server=$(command -v rabbitmq-server 2>/dev/null) || return 1
  home=$(dirname "$(dirname "$(readlink -f "$server")")")
  ls -d "$home"/plugins/rabbit-4.* >/dev/null 2>&1 && echo "$home"
}

# Prints `system` (this machine, or already inside the root) or `root`.
host_kind() {
  case ${STREAM_S3_HOST:-auto} in
    system | root) echo "${STREAM_S3_HOST}" ;;
    auto)
      if system_rabbitmq_home >/dev/null && command -v erl >/dev/null && command -v rebar3 >/dev/null; then
        echo system
      else
        echo root
      fi ;;
    *) die "STREAM_S3_HOST is '${STREAM_S3_HOST}', expected system, root or auto" ;;
  esac
}

# Names this checkout in folders that checkouts share.
checkout_key() { printf %s "$TOP" | cksum | cut -d' ' -f1; }

# Where what is built for this checkout and host goes: outside of the checkout, so that it stays clean and two never mix.
build_dir() { echo "${STREAM_S3_BUILD_DIR:-$CACHE/build/$(checkout_key)-$HOST_SUITE}"; }
