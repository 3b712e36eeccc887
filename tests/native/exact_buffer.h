#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace quire::test {

// `size` numbers that end where readable memory ends: a read past the last one is a crash. Under
// AddressSanitizer plain memory of that size does more, as a read before the first is seen too.
template <class T>
class ExactBuffer {
 public:
  explicit ExactBuffer(size_t size) : size_(size) {
#ifdef __SANITIZE_ADDRESS__
    data_ = static_cast<T*>(std::malloc(size * sizeof(T)));
#else
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (size * sizeof(T) + page - 1) / page * page;
    mapped_ = used + page;
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED || mprotect(static_cast<char*>(memory_) + used, page, PROT_NONE)) {
      throw std::bad_alloc();
    }
    data_ = reinterpret_cast<T*>(static_cast<char*>(memory_) + used) - size;
#endif
  }
  ~ExactBuffer() {
#ifdef __SANITIZE_ADDRESS__
    std::free(data_);
#else
    munmap(memory_, mapped_);
#endif
  }
  ExactBuffer(ExactBuffer&& other) noexcept
      : size_(std::exchange(other.size_, 0)),
        data_(std::exchange(other.data_, nullptr)),
        memory_(std::exchange(other.memory_, nullptr)),
        mapped_(std::exchange(other.mapped_, 0)) {}
  ExactBuffer& operator=(ExactBuffer&&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  size_t size_;
  T* data_;
  void* memory_ = nullptr;
  size_t mapped_ = 0;
};

}  // namespace quire::test
