#!/bin/sh
# Builds and runs pipelines.cpp with the metal-cpp of the MLX that is installed.
#
#   pipelines.sh PYTHON FOLDER     PYTHON has mlx; kernel_files.py has written to FOLDER
set -eu
here=$(dirname "$0")
sources=$here/../../../metal_ext/csrc
metal_cpp=$("$1" -c 'from importlib.util import find_spec
print(list(find_spec("mlx").submodule_search_locations)[0])')/include/metal_cpp
clang++ -std=c++20 -O1 -Wall -Wextra -Werror -I"$sources" -I"$sources/../kernels" -isystem "$metal_cpp" -o "$2/pipelines" \
  "$here/pipelines.cpp" "$sources/core/metal/kernel_text.cpp" "$2/kernel_texts.cpp" \
  -framework Metal -framework Foundation
"$2/pipelines"
