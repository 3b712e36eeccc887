"""How many threads of each kernel an M1's core holds: `make -C tests/metal occupancy`.

Mesa has an open compiler for Apple's first GPUs, with their registers and with how many threads
run beside each other at so many of them. ``tools`` builds it, ``kernels`` brings it our texts,
``__main__`` writes what it says. It is not Apple's compiler: it ranks, and finds what would spill.
"""
