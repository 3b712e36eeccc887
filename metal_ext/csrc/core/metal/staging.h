#pragma once

#include <Metal/Metal.hpp>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/metal/queues.h"
#include "core/records.h"

// Moves records between files and memory that only the GPU can access.
namespace quire::metal {

struct Context;

// Lets blits of records take turns with changes of mappings and residency sets: a blit counts as in
// flight. Any thread may call methods.
class Turns {
  struct End {
    void operator()(Turns* turns) const { turns->end(); }
  };

 public:
  using Turn = std::unique_ptr<Turns, End>;

  // Waits until no blit runs. Changes that wait come before blits that wait.
  Turn change();
  // Waits until nothing changes, and no other blit runs.
  Turn blit();

 private:
  void end();

  std::mutex mutex_;
  std::condition_variable ended_;
  size_t changes_waiting_ = 0;
  bool taken_ = false;
};

// A staging ring of two halves in memory that the CPU and the GPU share, with a queue of its own.
// Each record takes one half, so that one thread's blit runs while another thread's file is read:
//   from a file:  preadv | CRC-32C | blit | wait | preadv of the next piece ...
//   to a file:    blit | wait | pwritev | CRC-32C | blit of the next piece ...
class Staging {
 public:
  // The most bytes of one blit, which delays changes of mappings, and with them a step. It takes at
  // most 2 ms where steps leave it 4.2 GB/s of the GPU's memory; an M1 copies at 30 GB/s.
  static constexpr size_t kHalfBytes = size_t{8} << 20;

  struct Piece {
    uint64_t address;  // on the GPU; a multiple of 16
    size_t bytes;      // a multiple of 16
  };

  // Throws std::system_error(ENOMEM) if the device makes no queue or event.
  explicit Staging(Context& context);

  MTL::CommandQueue* queue() const { return work_.queue(); }
  // Moves the pieces as move_record() does. The first call makes the ring. Throws
  // std::system_error(ENOMEM) if the device refuses it, std::runtime_error if the device fails.
  uint32_t move(Direction direction, std::vector<Piece> pieces, FilePlace place);

 private:
  using Half = NS::SharedPtr<MTL::Buffer>;

  Half take();  // waits until a half is free
  void give_back(Half half);
  void blit(const std::vector<BlockArguments>& runs);

  Context& context_;
  BlockWork work_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable given_back_;
  std::vector<Half> free_;
  bool ready_ = false;  // whether the halves exist
};

}  // namespace quire::metal
