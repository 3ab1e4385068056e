# shellcheck shell=bash
# Sourced by other scripts. The comment at the top of a script is its --help, and the one list of its variables.

print_help() { # FILE
  sed -n '2,${/^#\( \|$\)/!q;s/^# \{0,1\}//;p}' "$1"
}

# A line of the help that begins with names in capitals explains these variables.
variables_of() { # FILE...
  sed -n 's/^#   \([A-Z][A-Z_]*\(  *[A-Z][A-Z_]*\)*\)  .*/\1/p' "$@" | tr -s ' ' '\n'
}

# Beginnings of our flags: those that say what is compressed and how, with those of the paper's artifact, and the others.
# shellcheck disable=SC2034  # by pretrain_gpt.sh and compare.sbatch
compressing='^--(no-)?(optimus-cc|pipeline-forward-format|compressed-backprop|lazy-error|residual-across|fused-embedding-sync'
compressing+='|dp-(compression|error-feedback)|param-gather-format|expert-(dispatch-format|gradient-format|exchange)|compression-(seed|state)'
compressing+='|block-rotation|only-between-nodes|chosen-preset|exact-blocks|(inter_|selective_)?grad_comp|emb_comm_opt|use_error_feedback|comp_seed)'
# shellcheck disable=SC2034
other_ours='^--(no-)?(compression-(metrics|forecast|trial|error-stat)|require-triton|force-compression|message-memory|check_orth_error)'

# Prints "WORD NAME" for the first word that is none of the names, but nearly one of them: up to one letter (from ten
# letters on two) too many, too few, another, or in the wrong order. NODE or MODELS may well be somebody else's: a name
# of less than eight letters has to be as long, and one of less than five is like too many.
misspelt() { # NAMES WORDS: lists, one a line
  awk '
    function distance(a, b,    i, j, d) {
      for (i = 0; i <= length(a); i++) d[i, 0] = i
      for (j = 0; j <= length(b); j++) d[0, j] = j
      for (i = 1; i <= length(a); i++)
        for (j = 1; j <= length(b); j++) {
          d[i, j] = d[i - 1, j - 1] + (substr(a, i, 1) != substr(b, j, 1))
          if (d[i - 1, j] + 1 < d[i, j]) d[i, j] = d[i - 1, j] + 1
          if (d[i, j - 1] + 1 < d[i, j]) d[i, j] = d[i, j - 1] + 1
          if (i > 1 && j > 1 && substr(a, i, 1) == substr(b, j - 1, 1) && substr(a, i - 1, 1) == substr(b, j, 1) &&
              d[i - 2, j - 2] + 1 < d[i, j]) d[i, j] = d[i - 2, j - 2] + 1
        }
      return d[length(a), length(b)]
    }
    NR == FNR { if (length($0) >= 5) names[$0]; known[$0]; next }
    !($0 in known) {
      for (name in names) {
        longer = length($0) - length(name)
        if (substr($0, 1, 1) != substr(name, 1, 1) || longer * longer > (length(name) < 8 ? 0 : 4)) continue
        if (distance($0, name) <= (length(name) < 10 ? 1 : 2)) { print $0, name; exit }
      }
    }' <(printf '%s\n' "$1") <(printf '%s\n' "$2")
}
