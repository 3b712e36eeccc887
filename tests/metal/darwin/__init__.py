"""A rung that speaks Darwin: ``make -C tests/metal darwin``.

The real ``quire serve`` and quire's own tests, on Linux, under a Mac's rules. Python's part is
``personality.py``, which site/sitecustomize.py loads into every process, the system's part is
system.c, which is preloaded, and the GPU is that of tests/metal/graph. Files are called check_*.py.

What is run as on a Mac: every branch that quire's Python takes on ``sys.platform``; its calls of
getrlimit, sysctlbyname and proc_pid_rusage; posix_memory.cpp as compiled for other systems than
Linux (mac_memory.cmake), over the limits of Darwin's shared memory, in pages of 16 KiB.

What is not: the rest of the extension, which is compiled for Linux, so that packed_linear.cpp gives
its hint for large pages, and dispatch.cpp looks for this processor's instructions; MLX, whose
arithmetic is the CPU's whatever its default device says; other libraries, which see Linux; and
Darwin's scheduling, its memory pressure (only its figures are there) and its sockets.
"""
