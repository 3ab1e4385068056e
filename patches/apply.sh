#!/usr/bin/env bash
# Makes plain `torchrun pretrain_gpt.py` of a Megatron-LM checkout load Optimus-CC, or takes that out again.
#   patches/apply.sh DIR           patch the checkout DIR; where it is patched already, nothing changes
#   patches/apply.sh DIR --check   only say which tag it is and whether it is patched
#   patches/apply.sh DIR --undo    the files as they were, byte by byte
# Which tag it is, the file's hash says. A file that is not known is left alone: exit code 1.
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

# Sets `tag` and, to "original" or "patched", `state`; the table holds both hashes of every tag.
identify() {
  local found name original patched
  found="$(hash_of "$file")"
  while read -r name original patched; do
    tag="$name"
    case "$found" in
      "$original") state=original && return ;;
      "$patched") state=patched && return ;;
    esac
  done < <(grep -v '^#' "$here/pretrain_gpt.sha256")
  die "$file is of no known tag (sha256 $found)." \
    "known: $(grep -v '^#' "$here/pretrain_gpt.sha256" | cut -d' ' -f1 | paste -sd' ')." \
    "Without a patch: torchrun ... -m optimus_cc_ext $file ..."
}

# Applies the tag's patch (with -R: takes it out) and makes sure that the outcome is the one that is known.
patch_to() {
  local wanted="$1" was="$state"
  shift
  (cd "$dir" && git apply --unidiff-zero "$@" "$here/$tag/pretrain_gpt.patch")
  identify
  [[ "$state" == "$wanted" ]] || die "git apply left $file $was"
}

[[ $# -ge 1 && $# -le 2 ]] || usage
dir="$1"
action="${2:-}"
file="$dir/pretrain_gpt.py"
[[ "$dir" != -* && "$action" =~ ^(|--check|--undo)$ ]] || usage
[[ -f "$file" ]] || die "$file does not exist: give the folder of a Megatron-LM checkout"

identify
case "$action" in
  --check) ;;
  --undo) [[ "$state" == original ]] || patch_to original -R ;;
  *) [[ "$state" == patched ]] || patch_to patched ;;
esac
echo "$file: $tag, $state"
