#!/usr/bin/env bash
# Makes a small image that stands in for an NGC PyTorch image: Debian, Python and the locked torch, nothing else.
#   make_base.sh NAME LOCK WORK
# Needs root, buildah and debootstrap. Debian's mirror is the one that this machine's apt uses; certificates and pip's
# settings are this machine's, too; they end up in this throw-away image only.
set -euo pipefail
name="$1" lock="$2" work="$3"
suite=trixie # the first Debian with Python >= 3.12

# shellcheck disable=SC2016  # $(SITE) is for apt
mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)"
[[ -n "$mirror" ]] || { echo "make_base.sh: error: apt on this machine knows no mirror of Debian" >&2; exit 2; }
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/tree" "$mirror"
rm -rf "$work"/tree/var/cache/apt/archives/*.deb "$work"/tree/var/lib/apt/lists/*

container="$(buildah from scratch)"
buildah add --quiet "$container" "$work/tree" /
rm -rf "$work/tree"
buildah copy --quiet "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
[[ ! -f /etc/pip.conf ]] || buildah copy --quiet "$container" /etc/pip.conf /etc/
buildah config --env PATH=/opt/python/bin:/usr/bin:/bin:/usr/sbin:/sbin --env LANG=C.UTF-8 "$container"
buildah run --isolation chroot "$container" -- python3 -m venv /opt/python
# pip's variables of this machine are passed by name, so that no command line shows their values.
mapfile -t settings < <(compgen -e PIP_ || true)
mapfile -t packages < <(grep -E '^(torch|numpy)==' "$lock")
buildah run --isolation chroot "${settings[@]/#/--env=}" "$container" -- \
  pip install --no-cache-dir --quiet "${packages[@]}"
# Like NGC's images, this one has constraints, one of them at another version than the lock's, and an old package.
buildah run --isolation chroot "${settings[@]/#/--env=}" "$container" -- \
  pip install --no-cache-dir --quiet --no-deps transformers==4.40.0
printf '%s\n' "$(grep -E '^numpy==' "$lock")" 'matplotlib==3.10.8' >"$work/constraint.txt"
buildah copy --quiet "$container" "$work/constraint.txt" /etc/pip/constraint.txt
buildah config --env PIP_CONSTRAINT=/etc/pip/constraint.txt "$container"
buildah commit --quiet --rm "$container" "$name"
