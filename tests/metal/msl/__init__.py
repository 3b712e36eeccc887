"""The Metal kernels' texts as C++ for the CPU."""
