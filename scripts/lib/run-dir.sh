# A run folder: what the nodes of one run share (ports, epmd, cookie), and how their processes are found again.
# Usage: DIR=...; . scripts/lib/common.sh; . scripts/lib/run-dir.sh. Owns port blocks, pid files and signals; knows nothing about RabbitMQ's config.
#
#   DIR/base-port           first port of this run's block; +0 is epmd, node I has +20+10*I ...
#   DIR/home/.erlang.cookie cookie of this run
#   DIR/NAME/pid            process id of a node, trusted only if that process carries our marker

PORT_FIRST=20000 PORT_LAST=31800 PORT_BLOCK=200

# Ports in LISTEN state on this machine, one a line.
listening_ports() {
  cat /proc/net/tcp /proc/net/tcp6 2>/dev/null |
    awk '$4 == "0A" { n = split($2, part, ":"); print part[n] }' | sort -u |
    while read -r hex; do echo $((16#$hex)); done
}

block_is_quiet() {
  local base=$1 port
  for port in $(listening_ports); do
    [ "$port" -ge "$base" ] && [ "$port" -lt $((base + PORT_BLOCK)) ] && return 1
  done
  return 0
}

# Prints the base port of this run, claiming a block the first time. A claim belongs to a folder and lapses
# with it, so a run that was cut off keeps its ports for its next start and nobody else meets its leftovers.
base_port() {
  local claims=$CACHE/run/.ports base owner
  [ -s "$DIR/base-port" ] && { cat "$DIR/base-port"; return 0; }
  mkdir -p "$claims" "$DIR"
  (
    flock 8
    [ -s "$DIR/base-port" ] && { cat "$DIR/base-port"; exit 0; }
    for pass in vacant idle; do
      for ((base = PORT_FIRST; base <= PORT_LAST; base += PORT_BLOCK)); do
        owner=$(cat "$claims/$base" 2>/dev/null || true)
        if [ -n "$owner" ] && [ -s "$owner/base-port" ]; then
          [ $pass = idle ] || continue
          [ -n "$(find "$owner/base-port" -mmin +120 2>/dev/null)" ] || continue
        fi
        block_is_quiet "$base" || continue
        [ $pass = idle ] && rm -f "$owner/base-port"
        echo "$DIR" >"$claims/$base"
        echo "$base" >"$DIR/base-port"
        echo "$base"
        exit 0
      done
    done
    die "no free block of ports between $PORT_FIRST and $PORT_LAST"
  ) 8>"$claims/.lock"
}

# Makes the run's cookie if it has none. Written aside and linked, so that two starts at once agree on one.
make_cookie() {
  local home=$DIR/home
  [ ! -s "$home/.erlang.cookie" ] || return 0
  mkdir -p "$home"
  (umask 077; head -c 18 /dev/urandom | base64 | tr -dc A-Za-z0-9 >"$home/.cookie.$$")
  chmod 400 "$home/.cookie.$$"
  ln "$home/.cookie.$$" "$home/.erlang.cookie" 2>/dev/null || true
  rm -f "$home/.cookie.$$"
}

# alive_as PID TEXT: that process exists and TEXT is one of its command line's arguments.
alive_as() {
  [ -n "$1" ] && [ -r "/proc/$1/cmdline" ] && tr '\0' '\n' <"/proc/$1/cmdline" 2>/dev/null | grep -xF -- "$2" >/dev/null
}

# Prints the pid of node NAME's virtual machine if it runs; also finds one whose pid file was lost.
node_pid() {
  local name=$1 marker=$DIR/$1 pid cmdline
  pid=$(cat "$DIR/$name/pid" 2>/dev/null || true)
  alive_as "$pid" "$marker" && { echo "$pid"; return 0; }
  for cmdline in $(grep -lsF -- "$marker" /proc/[0-9]*/cmdline 2>/dev/null || true); do
    pid=${cmdline#/proc/}
    pid=${pid%/cmdline}
    # Only the virtual machine: a shell that mentions the folder is not the node.
    case $(readlink "/proc/$pid/exe" 2>/dev/null || true) in *beam.smp*) ;; *) continue ;; esac
    alive_as "$pid" "$marker" && { echo "$pid"; return 0; }
  done
  return 1
}

# Names of the nodes of this run, started or not.
node_names() {
  local file
  for file in "$DIR"/*/index; do
    [ -e "$file" ] && basename "$(dirname "$file")"
  done
  return 0
}

# wait_until SECONDS COMMAND...: polls a condition until it holds or time is up.
wait_until() {
  local deadline=$(($(date +%s) + $1))
  shift
  until "$@"; do
    [ "$(date +%s)" -lt "$deadline" ] || return 1
    sleep 0.1
  done
}

is_gone() { ! node_pid "$1" >/dev/null; }
epmd_pid() {
  local pid
  pid=$(cat "$DIR/epmd.pid" 2>/dev/null || true)
  alive_as "$pid" "$(base_port)" && echo "$pid"
}

# One epmd for each run, on loopback, on a port of its own: it never meets the machine's.
start_epmd() {
  epmd_pid >/dev/null && return 0
  local port
  port=$(base_port)
  setsid "$TOP/scripts/lib/in-host" epmd -port "$port" -address 127.0.0.1 \
    </dev/null >>"$DIR/epmd.log" 2>&1 7>&- 8>&- 9>&- &
  echo $! >"$DIR/epmd.pid"
  wait_until 20 epmd_listens "$port" || die "epmd did not start: $(tail -n 3 "$DIR/epmd.log")"
}
epmd_listens() { listening_ports | grep -x "$1" >/dev/null; }

stop_epmd_if_last() {
  local name pid
  for name in $(node_names); do node_pid "$name" >/dev/null && return 0; done
  pid=$(epmd_pid) && kill "$pid" 2>/dev/null
  rm -f "$DIR/epmd.pid"
}
