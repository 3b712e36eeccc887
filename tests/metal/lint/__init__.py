"""The Metal kernels' texts, read as C++ for OpenCL: `make -C tests/metal lint`."""
