#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "fake_stage.h"

namespace quire::fake {
namespace {

TEST("a heap's page stands at two addresses, and what comes through one is seen at the other") {
  Stage stage;
  stage.map(2, 2, 1);
  stage.map(8, 1, 2);
  auto* const first = reinterpret_cast<char*>(stage.buffer->gpuAddress());
  CHECK(first[2 * kPage] == '\xff');  // nobody has filled it
  first[3 * kPage + 17] = 5;
  CHECK(first[8 * kPage + 17] == 5);
  stage.unmap(3, 1);
  CHECK(first[8 * kPage + 17] == 5);
  CHECK(stage.machine.errors().empty());
}

TEST("access to what is not mapped ends the process, by name") {
  const pid_t child = fork();
  if (child == 0) {
    Stage stage;
    stage.map(0, 1, 0);
    auto* const first = reinterpret_cast<volatile char*>(stage.buffer->gpuAddress());
    std::fclose(stderr);
    first[kPage] = 1;
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 77);
}

TEST("an object that has just died is caught, however many have died before it") {
  Machine machine({});
  const auto device = new_device();
  MTL::SharedEvent* event = nullptr;
  for (int i = 0; i <= 100'000; ++i) {
    event = device->newSharedEvent();
    event->release();
  }
  CHECK(machine.errors().empty());
  CHECK(event->signaledValue() == 0);
  CHECK(machine.errors().size() == 1);
  CHECK(machine.errors().front().find("a released MTLSharedEvent") != std::string::npos);
}

TEST("commands run in the order of their queue, and queues in any order") {
  std::string first_orders;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Machine machine({.seed = seed});
    const auto pool = NS::TransferPtr(NS::AutoreleasePool::alloc()->init());
    const auto device = new_device();
    std::string order;
    for (const char name : {'a', 'b'}) {
      const auto queue = NS::TransferPtr(device->newCommandQueue());
      for (int i = 0; i < 3; ++i) {
        auto* const commands = queue->commandBuffer();
        encode(commands, "a command", {}, [&order, name, i] {
          order += name;
          order += static_cast<char>('0' + i);
        });
        commands->commit();
      }
    }
    machine.run();
    CHECK(order.size() == 12);
    for (const char* pair : {"a0", "a1", "a2", "b0", "b1", "b2"}) {
      CHECK(order.find(pair) != std::string::npos);
    }
    CHECK(order.find("a0") < order.find("a1") && order.find("a1") < order.find("a2"));
    first_orders += order[0];
  }
  CHECK(first_orders.find('a') != std::string::npos && first_orders.find('b') != std::string::npos);
}

TEST("a command buffer that fails runs no signal, and says why") {
  Stage stage;
  stage.machine.fail_next_commands("out of patience");
  auto* const commands = stage.queue->commandBuffer();
  commands->encodeSignalEvent(stage.event.get(), 1);
  commands->commit();
  commands->waitUntilCompleted();
  CHECK(commands->status() == MTL::CommandBufferStatusError);
  const NS::String* const words = commands->error()->localizedDescription();
  CHECK(std::strcmp(words->utf8String(), "out of patience") == 0);
  CHECK(stage.event->signaledValue() == 0);
}

}  // namespace
}  // namespace quire::fake
