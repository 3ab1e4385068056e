"""What each technique will gain or lose on this cluster, from what the first iterations measure.

`probe` measures links, `microbenchmark` compressors; `timeline` simulates 1F1B; `forecast` compares.
"""
