"""The Metal kernels' texts, read as C++ for OpenCL: `make metal-lint`."""
