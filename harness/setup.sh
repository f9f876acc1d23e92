#!/usr/bin/env bash
# Set-up steps that Python cannot do for itself: the virtual environment, the distribution's pyverbs, and the
# packages of the soft-RoCE guest. Each step is idempotent, so an interrupted first run is finished by the second.
#
#   setup.sh venv     virtual environment with pinned versions, pyverbs linked in
#   setup.sh peers    a second environment with what tests and benchmarks compare with: torch, or the extras that are named
#   setup.sh apt      Debian/Ubuntu packages that verbs and the guest need (root), or the line that would install them
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
PEERS=.venv-peers
# The distribution's interpreter is the one that its python3-pyverbs is built for; another build may not load it.
PYTHON=${VERBFLOW_PYTHON:-/usr/bin/python3}
[ -x "$PYTHON" ] || PYTHON=$(command -v python3)

say() { printf 'setup: %s\n' "$*" >&2; }

# The generic kernel has rdma_rxe; Debian's cloud kernel does not, and Ubuntu keeps it in linux-modules-extra, which
# linux-image-generic pulls in.
guest_packages() {
    . /etc/os-release
    case "${ID:-}:${ID_LIKE:-}" in
        ubuntu:* | *:*ubuntu*) echo linux-image-generic ;;
        *) echo linux-image-amd64 ;;
    esac
    echo qemu-system-x86 busybox-static kmod iproute2 file zstd xz-utils
}

verbs_packages() {
    echo rdma-core ibverbs-providers ibverbs-utils perftest rdmacm-utils python3-pyverbs
}

is_installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q '^install ok installed$'; }

has_rdma_device() { [ -n "$(ls -A /sys/class/infiniband 2>/dev/null)" ]; }

missing_packages() {
    local wanted="python3-venv iproute2 $(verbs_packages)"
    has_rdma_device || wanted="$wanted $(guest_packages)"
    local package
    for package in $wanted; do is_installed "$package" || printf '%s ' "$package"; done
}

install_apt() {
    if ! command -v apt-get >/dev/null; then
        say "no apt-get here; RDMA over soft-RoCE needs these packages' equivalents: $(verbs_packages) $(guest_packages | tr '\n' ' ')"
        return 0
    fi
    local missing
    missing=$(missing_packages)
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" -ne 0 ]; then
        say "some packages are missing; RDMA is left out until somebody runs:"
        say "    sudo apt-get install -y --no-install-recommends $missing"
        return 0
    fi
    say "installing $missing"
    # Lists may be old or absent on a fresh machine. A kernel package must not touch this machine's boot loader, and
    # without recommends it does not.
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || say "apt-get update failed; trying with the lists at hand"
    # shellcheck disable=SC2086  # a list of names, to be split
    apt-get install -y -qq --no-install-recommends $missing >/tmp/verbflow-apt.$$ 2>&1 || {
        cat /tmp/verbflow-apt.$$ >&2
        say "apt-get install failed; what needs no RDMA still runs"
    }
    rm -f /tmp/verbflow-apt.$$
}

link_pyverbs() {
    # Only this one package: the whole dist-packages folder on the path would shadow numpy.
    local source=/usr/lib/python3/dist-packages/pyverbs site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    [ -d "$source" ] || return 0
    [ -e "$site/pyverbs" ] || ln -sfn "$source" "$site/pyverbs"
}

make_venv() {
    local stamp="$VENV/.complete" want
    want=$(cat pyproject.toml constraints.txt harness/setup.sh | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        link_pyverbs
        return 0
    fi
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        say "$PYTHON is $("$PYTHON" -V 2>&1); Verbflow needs Python 3.11 or newer (name another in VERBFLOW_PYTHON)"
        exit 1
    }
    "$PYTHON" -c 'import ensurepip' 2>/dev/null || {
        say "$PYTHON cannot make virtual environments; run: sudo apt-get install -y python3-venv"
        exit 1
    }
    say "making the virtual environment (a minute or two, once)"
    rm -f "$stamp"
    # Not an upgrade of the old one: it may hold a half-finished install or a moved interpreter.
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    link_pyverbs
    printf '%s' "$want" >"$stamp"
}

# Optional, so a machine that cannot have them hears why and goes on. The file .missing holds the reason meanwhile.
make_peers() {
    local stamp="$PEERS/.complete" want extras="${*:-torch}" named
    want=$(echo "$extras" | cat - pyproject.toml constraints.txt harness/setup.sh | cksum)
    if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && "$PEERS/bin/python" -c '' 2>/dev/null; then
        return 0
    fi
    say "making $PEERS with $extras (minutes and a gigabyte or more, once)"
    [ -x "$PEERS/bin/python" ] || "$PYTHON" -m venv "$PEERS"
    rm -f "$stamp"
    named=$("$PYTHON" - $extras <<'EOF'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = {"numpy", "grpcio", "protobuf", "psutil", "scikit-learn", "safetensors", "pytest", "pytest-timeout", "hypothesis"}
optional = project["optional-dependencies"]
names = [line for line in project["dependencies"] + optional["dev"] if line.split("==")[0] in wanted]
print(*names, *(line for extra in sys.argv[1:] for line in optional[extra]))
EOF
    )
    # shellcheck disable=SC2086  # a list of requirements, to be split
    if "$PEERS/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt $named 2>"$PEERS/.missing"; then
        rm -f "$PEERS/.missing"
        printf '%s' "$want" >"$stamp"
    else
        say "cannot install $extras: $(grep -v '^WARNING' "$PEERS/.missing" | tail -n 1)"
    fi
}

case "${1:-}" in
    venv) make_venv ;;
    peers) shift && make_peers "$@" ;;
    apt) install_apt ;;
    missing) missing_packages ;;
    *) say "usage: setup.sh venv|peers [extra...]|apt|missing"; exit 2 ;;
esac
