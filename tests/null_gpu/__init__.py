"""A GPU that computes nothing: torch's CUDA code runs on a machine without one. `make test-null-gpu` runs it.

    build.py     builds a library in place of CUDA's runtime, cuBLAS and NCCL for one rank, from runtime.cpp and stubs
    emulate.py   computes each operation on the CPU, in the same memory
    plugin.py    starts the emulation in pytest and its ranks; names the tests that cannot run here
    __main__.py  runs a Python command with the null GPU

What it shows: torch's own host code accepts our calls (devices, dtypes, shapes, streams, FSDP2, selection of kernels,
launch configurations, allocators, NCCL groups of one rank), where the host waits or copies from pageable memory, and
that the numbers are those of a CPU. What it cannot show: results of CUDA kernels, races between streams, speed, several
ranks, and kernels of Triton and Inductor: --compile runs eagerly here.
"""
