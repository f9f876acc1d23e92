#!/usr/bin/env bash
# First process of ours in the soft-RoCE guest, run as its root: makes an RDMA device, then runs the job.
#
#   guest.sh EXCHANGE
#
# EXCHANGE is the one folder that host and guest both write. It holds `settings` (variables of this script, quoted for
# bash) and `job` (the script to run); here appear `failed` (one line, set-up did not work) and `rc` (the job's exit code).
set -uo pipefail
exchange=$1
# shellcheck source=/dev/null
. "$exchange/settings"
exec 2>&1 # one stream: the order of two is lost on the way to the host

fail() {
    echo "$*" >"$exchange/failed"
    exit 125
}

# A guest whose launcher was killed must not live on.
if [ "${limit_s:-0}" -gt 0 ]; then
    (sleep "$limit_s"; poweroff -f) </dev/null >/dev/null 2>&1 &
fi

# The checkout is read-only here. A layer in memory takes what programs write beside their sources (bytecode, caches);
# it vanishes with the guest, so the host's files stay as they are.
if cd "$checkout" && [ ! -w . ]; then
    mkdir -p /run/verbflow/upper /run/verbflow/work
    mount -t overlay -o lowerdir=.,upperdir=/run/verbflow/upper,workdir=/run/verbflow/work overlay "$checkout" ||
        fail "cannot lay a writable layer over $checkout"
fi
# Folders that the host shares for writing were mounted under plain names; here they come to their own places.
for index in "${!writable[@]}"; do
    mount --bind "/run/verbflow/writable$index" "${writable[$index]}" ||
        fail "cannot mount ${writable[$index]} for writing"
done

modprobe rdma_rxe || fail "modprobe rdma_rxe failed in kernel $(uname -r)"
ip link set lo up
if [ -n "$wire_mac" ]; then
    for path in /sys/class/net/*; do
        [ "$(cat "$path/address")" = "$wire_mac" ] && interface=${path##*/}
    done
    [ -n "${interface:-}" ] || fail "no network interface with address $wire_mac"
else
    interface=dummy0
    ip link add $interface type dummy || fail "cannot add $interface"
fi
# 4200: the largest RoCE MTU (4096) and its headers.
ip addr add "$address/24" dev "$interface" && ip link set "$interface" mtu 4200 up || fail "cannot configure $interface"
rdma link add rxe0 type rxe netdev "$interface" || fail "cannot add rxe0 on $interface"
ulimit -l unlimited

# The address becomes a GID some time later. Only then can a queue pair be connected over it.
gid=$(printf '0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x' ${address//./ })
for ((attempt = 0; ; attempt++)); do
    grep -qsx "$gid" /sys/class/infiniband/rxe0/ports/1/gids/* && break
    [ $attempt -lt 200 ] || fail "rxe0 has no GID for $address after 20 s"
    sleep 0.1
done

export VERBFLOW_INTERFACE=$interface
# A copy, because the exchange is private to the host's user and $user may be another.
mkdir -p /run/verbflow && install -m 755 "$exchange/job" /run/verbflow/job
run=(bash /run/verbflow/job)
if [ -n "$user" ]; then
    # Not su: it would set the limits of limits.conf again.
    run=(setpriv --reuid "$user" --regid "$(id -g "$user")" --init-groups "${run[@]}")
fi
if [ "$interactive" = 1 ]; then
    "${run[@]}"
else
    "${run[@]}" </dev/null
fi
echo $? >"$exchange/rc"
sync
