#!/bin/sh
# The fast tests with the oldest torch that pyproject.toml allows: `make oldest`.
#
# Debian 13 has torch 2.6 with Python 3.13, for CPUs only. It is put into a folder of its own, and
# kept there: the next time the tests begin after half a minute.
#   FOLDER   where: 4 GB, not on a filesystem mounted with nodev (/var/tmp/taut-oldest)
#   SHOWN    more folders of this machine that pip shall see there, such as a local index
#   WORKERS  pytest processes (2)
# All arguments go to make, as in `sh tests/oldest.sh ARGS="-k batch"`.
set -eu
folder=${FOLDER:-/var/tmp/taut-oldest}
cd "$(dirname "$0")/.."

fail() { echo "make oldest: $1" >&2; exit 1; }
[ "$(uname)" = Linux ] || fail "it needs Linux, as it runs Debian's programs."
[ "$(id -u)" = 0 ] || fail "it needs root, for chroot and mount: run it as root, or by sudo."
command -v debootstrap >/dev/null || fail "it needs debootstrap: apt-get install debootstrap."

# In a mount namespace of its own: what is mounted is gone when this script is.
[ "${1:-}" = inside ] || exec unshare --mount sh "tests/$(basename "$0")" inside "$@"
shift

if [ ! -e "$folder/ready" ]; then
    echo "== Debian 13 into $folder: 3 minutes"
    debootstrap --variant=minbase trixie "$folder" http://deb.debian.org/debian >"$folder.log" ||
        fail "debootstrap failed, see $folder.log; remove $folder before the next try."
fi
inside() {
    chroot "$folder" env HOME=/root LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}
for shown in /proc /dev /dev/shm ${SHOWN:-}; do
    mkdir -p "$folder$shown"
    mount --bind "$shown" "$folder$shown"
done
# The way to the network is this machine's.
for file in /etc/resolv.conf /etc/pip.conf; do
    [ ! -e $file ] || cp -L $file "$folder$file"
done
if [ ! -e "$folder/ready" ]; then
    inside apt-get -qq update
    inside env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
        ca-certificates g++ libtorch-dev make python3-dev python3-torch python3-venv >>"$folder.log"
    mkdir "$folder/taut"
    inside python3 -m venv --system-site-packages /taut/.venv
    touch "$folder/ready"
fi
[ ! -e /etc/ssl/certs/ca-certificates.crt ] ||
    cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"

find "$folder/taut" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
rm -f "$folder"/taut/.venv/.installed-*
git -c safe.directory="$PWD" ls-files -z -co --exclude-standard |
    tar -c --null --ignore-failed-read -T - | tar -xC "$folder/taut"

torch=$(inside python3 -c "import torch; print(torch.__version__)")
echo "== torch $torch, $(inside python3 --version)"
inside make -C /taut tests TORCH="$torch" WORKERS="${WORKERS:-2}" "$@"
