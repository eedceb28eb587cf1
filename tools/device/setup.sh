# Source this on the GPU machine, in the repository's root: unpacks the peers that were carried in .whl (pack_peers.sh)
# into /tmp/site, sets the environment and defines `step`. What an earlier call unpacked stays. Results go to $OUT.
site=/tmp/site
OUT=${OUT:-$PWD/out}
mkdir -p "$site" "$OUT"
for part in .whl/part*.tar.xz; do
    mark="$site/.$(basename "$part")"
    if [ -e "$part" ] && [ ! -e "$mark" ]; then tar -xJf "$part" -C "$site" && touch "$mark"; fi
done
export PYTHONPATH="$PWD/src:$site:$site/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$(echo "$site"/ninja-*.data/scripts):$PATH"
export FLASHINFER_DISABLE_VERSION_CHECK=1 PYTHONUNBUFFERED=1 MAX_JOBS=16
chmod +x "$site"/ninja-*.data/scripts/* 2>/dev/null || true
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader

step() { # step NAME SECONDS COMMAND...: run with a limit, keep the log, print its end and the time it took
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1 || status=$?
    echo "== $name: status $status, $((SECONDS - began)) s"
    tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log" | cut -c1-300
}
