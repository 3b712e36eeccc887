// The kernels that the host can ask for, and their texts as it would compile them.
//
//   print_kernels                     every name and its file, a line each
//   print_kernels NAME...             the library text of these kernels, which are of one file
#include <cstdio>
#include <cstring>

#include "all_kernels.h"

int main(int count, char** names) {
  const std::vector<quire::metal::Kernel> all = quire::metal::all_kernels();
  std::vector<quire::metal::Kernel> wanted;
  for (int i = 1; i < count; ++i) {
    for (const quire::metal::Kernel& kernel : all) {
      if (kernel.name == names[i]) {
        wanted.push_back(kernel);
      }
    }
    if (wanted.size() != static_cast<size_t>(i)) {
      std::fprintf(stderr, "no kernel is called %s\n", names[i]);
      return 1;
    }
  }
  if (wanted.empty()) {
    for (const quire::metal::Kernel& kernel : all) {
      std::printf("%s %s\n", kernel.name.c_str(), kernel.file.c_str());
    }
  } else {
    std::fputs(quire::metal::library_text(wanted).c_str(), stdout);
  }
  return 0;
}
