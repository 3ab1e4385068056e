#!/usr/bin/env bash
# A small image that stands in for an NGC PyTorch image: Debian, Python, and the locked torch; nothing else.
#   make_base.sh NAME LOCK WORK [buildah's options for its storage]
# Needs root, buildah and debootstrap. The Debian mirror is the one that this machine's apt uses, certificates and
# pip's settings are this machine's too: all three are read now, and end up in this throw-away image only.
set -euo pipefail
name="$1" lock="$2" work="$3"
storage=("${@:4}")
suite=trixie # the first Debian with Python >= 3.12

mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -E '/debian/?$' | head -n 1)"
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$work/root" "$mirror"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*

container="$(buildah "${storage[@]}" from scratch)"
buildah "${storage[@]}" add --quiet "$container" "$work/root" /
rm -rf "$work/root"
buildah "${storage[@]}" copy --quiet "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
[[ ! -f /etc/pip.conf ]] || buildah "${storage[@]}" copy --quiet "$container" /etc/pip.conf /etc/
buildah "${storage[@]}" config --env PATH=/opt/python/bin:/usr/bin:/bin:/usr/sbin:/sbin --env LANG=C.UTF-8 "$container"
torch="$(grep -E '^torch==' "$lock")" numpy="$(grep -E '^numpy==' "$lock")"
# pip's variables, which no file names, are handed through.
mapfile -t pip_environment < <(compgen -e PIP_ || true)
buildah "${storage[@]}" run --isolation chroot "${pip_environment[@]/#/--env=}" "$container" -- \
  sh -c "python3 -m venv /opt/python && pip install --no-cache-dir -q $torch $numpy setuptools"
buildah "${storage[@]}" commit --quiet --rm "$container" "$name"
