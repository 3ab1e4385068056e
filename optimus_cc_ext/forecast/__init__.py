"""Forecast of each technique's gain or loss on this cluster, from measurements of the first iterations.

Imports techniques, compressors, metrics and config; `timeline` needs no torch, so that the planner can use it.
`measure` times this rank's links (`probe`) and compressors (`microbenchmark`), `timeline` simulates 1F1B, and
`forecast` compares the iteration with and without each technique. Start reading at `forecast.py`.
"""
