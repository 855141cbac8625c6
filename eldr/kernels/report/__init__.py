"""The kernel report: what the compilers make of every kernel, found out without a GPU.

`python -m eldr.kernels.report --arch 80,90,100,gfx942` compiles every Triton kernel at the shapes
of real models and every CUDA kernel instance, reads registers, spills, shared memory and vector
loads from the machine code, and fails where a bound of `eldr.kernels.report.bounds` is broken.
"""
