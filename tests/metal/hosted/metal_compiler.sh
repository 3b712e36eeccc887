#!/bin/sh
# Apple's Metal compiler, and what it says of the kernels.
#
#   metal_compiler.sh install          makes sure that it is there: Xcode 26 brings it separately
#   metal_compiler.sh compile FOLDER   every .metal file of the folder, in every language that the
#                                      kernels are compiled in on this macOS or an older one;
#                                      warnings are errors
set -eu

case $1 in
  install)
    xcrun -sdk macosx metal --version || xcodebuild -downloadComponent MetalToolchain
    xcrun -sdk macosx metal --version
    ;;
  compile)
    count=0
    case $(sw_vers -productVersion) in
      14.*) standards="metal3.1" ;;
      15.*) standards="metal3.1 metal3.2" ;;
      *) standards="metal3.1 metal3.2 metal4.0" ;;
    esac
    for standard in $standards; do
      for text in "$2"/*.metal; do
        xcrun -sdk macosx metal -std=$standard -Wall -Werror -c "$text" \
          -o "${text%.metal}.$standard.air"
        count=$((count + 1))
      done
    done
    test $count -gt 0
    echo "$count compilations without a warning"
    ;;
  *)
    echo "metal_compiler.sh knows install and compile" >&2
    exit 2
    ;;
esac
