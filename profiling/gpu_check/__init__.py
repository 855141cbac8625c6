"""The one-shot check of a GPU: builds, parity, synchronisation audit, timings, expert cost.

`make gpu-check`, or `python -m profiling.gpu_check`: one command, one process, under eight minutes
on an H200. Writes results/gpu/NAME.json and a table beside it. Needs torch with CUDA; exits 3
without.
"""
