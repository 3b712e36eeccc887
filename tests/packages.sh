#!/bin/sh
# Install the packages of Debian that are missing: tests/packages.sh clang-19 libclang-rt-19-dev
# Gates that run side by side wait for each other here.
set -eu
installed() {
  test "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2> /dev/null)" = installed
}
for package in "$@"; do
  installed "$package" || missing="${missing-} $package"
done
test -n "${missing-}" || exit 0
as_root=$(test "$(id -u)" = 0 || echo sudo)
# shellcheck disable=SC2086
exec flock "${TMPDIR:-/tmp}/quire-packages" $as_root env DEBIAN_FRONTEND=noninteractive \
  sh -c 'apt-get update -q && apt-get install -qy --no-install-recommends "$@"' sh $missing
