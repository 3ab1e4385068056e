# shellcheck shell=bash
# Sourced by submit.sh: `submit.sh paper all`, one job for each experiment of the paper, all in one results folder.
# shellcheck disable=SC2154  # here, root, fail are submit.sh's

submit_all() { # [--only PATTERN] [--dry-run] WORDS OF SUBMIT.SH FOR EACH JOB...
  local pattern='*' dry_run="" words=() flags=() file name names=() given line
  while (($# > 0)); do
    case "$1" in
      --only=*) pattern="${1#*=}" ;;
      --only)
        pattern="${2:-}"
        shift
        ;;
      --dry-run) dry_run=yes ;;
      --)
        flags=("$@")
        break
        ;;
      SCALE=*) export SCALE="${1#*=}" ;;
      *) words+=("$1") ;;
    esac
    shift
  done
  for file in "$root"/scripts/paper/{table2,figure10,figure11,figure12}/*.sh figure14.sh; do
    name="${file#"$root/scripts/paper/"}" name="${name%.sh}"
    # shellcheck disable=SC2053  # a pattern is meant
    [[ "$name" != $pattern ]] || names+=("$name")
  done
  ((${#names[@]} > 0)) || fail --only "no experiment fits '$pattern'" "Names are such as table2/2.5b-cb and figure14"
  [[ "${SCALE:-paper}" == paper ]] || echo "submit.sh: SCALE=$SCALE: hours of the paper's models would say nothing here" >&2
  for name in "${names[@]}"; do
    [[ "$name" == figure14 ]] || "$root/scripts/paper/$name.sh" --describe
  done | awk -v scale="${SCALE:-paper}" '
    BEGIN { printf "%-26s %5s %10s %10s %8s\n", "experiment", "nodes", "iterations", "GPU hours", "TB" }
    { if (scale != "paper") { $4 = $5 = "-" }
      printf "%-26s %5s %10s %10s %8s\n", $1, $2, $3, $4, $5; iterations += $3; hours += $4; disk += $5 }
    END { printf "%-26s %5s %10d %10.0f %8.1f\n", NR " trainings", "", iterations, hours, disk }'
  # What one experiment is refused for, all are, so that none is submitted.
  for name in "${names[@]}"; do
    given=("$name" "${words[@]}")
    [[ "$name" == figure14 ]] || given+=("${flags[@]}")
    [[ "$name" != "${names[0]}" ]] || "$here/submit.sh" paper "${given[@]}" --dry-run >/dev/null
    if [[ -n "$dry_run" ]]; then
      printf -v line ' %q' "$here/submit.sh" paper "${given[@]}"
      echo "${line# }"
    else
      DOCTOR=no "$here/submit.sh" paper "${given[@]}"
    fi
  done
  [[ -n "$dry_run" ]] || echo "submit.sh: when they have ended: scripts/slurm/submit.sh paper collect" >&2
}
