#!/usr/bin/env bash
# Makes plain `torchrun pretrain_gpt.py` of a Megatron-LM checkout load Optimus-CC, or undoes this change.
#   patches/apply.sh DIR           patch the checkout DIR; if it is patched already, nothing changes
#   patches/apply.sh DIR --check   only print the checkout's tag, and whether it is patched
#   patches/apply.sh DIR --undo    restore the files, byte by byte
# The hash of pretrain_gpt.py tells the tag. A file with an unknown hash is left alone: exit code 1.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

die() {
  printf 'patches/apply.sh: %s\n' "$@" >&2
  exit 1
}

usage() {
  sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
  exit 2
}

hash_of() {
  sha256sum "$1" | cut -d' ' -f1
}

# Sets `tag` and, to "original" or "patched", `state` of the file $1; the table holds both hashes of every tag.
identify() {
  local found name original patched
  found="$(hash_of "$1")"
  while read -r name original patched; do
    tag="$name"
    case "$found" in
      "$original") state=original && return ;;
      "$patched") state=patched && return ;;
    esac
  done < <(grep -v '^#' "$here/pretrain_gpt.sha256")
  die "$1 is of no known tag (sha256 $found)." \
    "known: $(grep -v '^#' "$here/pretrain_gpt.sha256" | cut -d' ' -f1 | paste -sd' ')." \
    "Without a patch: torchrun ... -m optimus_cc_ext $1 ..."
}

# Applies the tag's patch (-R: undoes it) to a copy, which replaces the file if it has the expected hash.
patch_to() {
  local wanted="$1" was="$state"
  shift
  copy="$(mktemp -d)"
  trap 'rm -rf "$copy"' EXIT
  cp "$file" "$copy/"
  (cd "$copy" && git apply --unidiff-zero "$@" "$here/$tag/pretrain_gpt.patch")
  identify "$copy/pretrain_gpt.py"
  [[ "$state" == "$wanted" ]] || die "git apply left it $was"
  cat "$copy/pretrain_gpt.py" >"$file"
}

[[ $# -ge 1 && $# -le 2 ]] || usage
dir="$1"
action="${2:-}"
file="$dir/pretrain_gpt.py"
[[ "$dir" != -* && "$action" =~ ^(|--check|--undo)$ ]] || usage
[[ -f "$file" ]] || die "$file does not exist: give the folder of a Megatron-LM checkout"

identify "$file"
case "$action" in
  --check) ;;
  --undo) [[ "$state" == original ]] || patch_to original -R ;;
  *) [[ "$state" == patched ]] || patch_to patched ;;
esac
echo "$file: $tag, $state"
