# macOS on arm64, from Linux. Wants QUIRE_CROSS_MACOS (deployment target), QUIRE_CROSS_SDK (stand-in
# for Apple's SDK) and QUIRE_CROSS_ZIG (zig's path).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_ARCHITECTURES arm64)
set(CMAKE_OSX_DEPLOYMENT_TARGET ${QUIRE_CROSS_MACOS})
set(CMAKE_OSX_SYSROOT ${QUIRE_CROSS_SDK})
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES
  QUIRE_CROSS_MACOS QUIRE_CROSS_SDK QUIRE_CROSS_ZIG)

set(driver ${CMAKE_CURRENT_LIST_DIR}/driver)
set(CMAKE_C_COMPILER ${driver} cc ${QUIRE_CROSS_ZIG} ${QUIRE_CROSS_MACOS})
set(CMAKE_CXX_COMPILER ${driver} c++ ${QUIRE_CROSS_ZIG} ${QUIRE_CROSS_MACOS})
set(CMAKE_AR llvm-ar-19)
set(CMAKE_RANLIB llvm-ranlib-19)
set(CMAKE_INSTALL_NAME_TOOL llvm-install-name-tool-19)
set(shim "-isystem ${CMAKE_CURRENT_LIST_DIR}/shim_apple")
set(CMAKE_C_FLAGS_INIT ${shim})
set(CMAKE_CXX_FLAGS_INIT ${shim})

set(CMAKE_COMPILE_WARNING_AS_ERROR ON)
set(CMAKE_MODULE_LINKER_FLAGS_INIT -Wl,-fatal_warnings)

# Threads are in libSystem; CMake would ask with functions that nobody here imports.
set(CMAKE_HAVE_LIBC_PTHREAD TRUE CACHE INTERNAL "")
