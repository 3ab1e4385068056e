"""What each technique will gain or lose on this cluster, from what the first iterations measure.

`probe` measures links and collectives, `microbenchmark` the compressors; `timeline` simulates 1F1B; `decide` compares.
"""
