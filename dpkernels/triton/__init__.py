"""The GPU kernels that are tiles of matrix products, in Triton: for NVIDIA and AMD.

`gpu.load` registers them under the dispatcher's CUDA key. Importing this package imports triton. Every kernel is run by
the tests in Triton's interpreter, and compiled ahead of time for the GPUs of `configurations`; none was ever timed by
those who wrote it, who have no GPU.
"""
