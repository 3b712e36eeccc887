// What tests ask of the stand-ins, from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fake/machine.h"
#include "fake/memory.h"
#include "mlx/array.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx_model.h"
#include "recorder.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace quire::graph {
namespace {

// The result of an operation of MLX's own, with what that operation read: for the model it is one
// command.
class Observed final : public mx::Primitive {
 public:
  Observed() : Primitive(mx::default_stream(mx::default_device())) {}
  const char* name() const override { return "observed"; }
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    out[0].copy_shared_buffer(in[0]);
    Recorder::instance().begin(Recorder::kForeign);
    encode_foreign(stream(), {in.begin() + 1, in.end()}, out[0]);
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::logic_error("there is no GPU here");
  }
};

mx::array observed(const mx::array& result, std::vector<mx::array> reads) {
  reads.insert(reads.begin(), result);
  return mx::array(result.shape(), result.dtype(), std::make_shared<Observed>(), std::move(reads));
}

// An array in row-major order, of zeros that take no memory until they are written.
mx::array zeros_of_nothing(const std::vector<int>& shape, mx::Dtype type) {
  constexpr size_t kAddresses = size_t{1} << 42;
  static auto* const begin = static_cast<std::byte*>(mmap(
      nullptr, kAddresses, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
      0));
  static size_t used = 0;
  mx::array array({shape.begin(), shape.end()}, type, nullptr, {});
  const size_t start = used;
  used += (array.nbytes() + 4096) / 4096 * 4096;
  if (begin == MAP_FAILED || used > kAddresses) {
    throw std::bad_alloc();
  }
  array.set_data(mx::allocator::Data(
      mx::allocator::Buffer(begin + start), [](mx::allocator::Buffer) {}));
  array.set_status(mx::array::Status::available);
  return array;
}

void start(uint64_t seed, const std::set<std::string>& lacks) {
  fake::Options options;
  options.seed = seed;
  options.background = true;
  options.lacks = lacks;
  new fake::Machine(options);  // for the life of the process
  Recorder::instance().seed(seed);
}

std::vector<std::string> take_mistakes() {
  std::vector<std::string> all = Recorder::instance().take_mistakes();
  for (const std::string& mistake : fake::Machine::current().take_errors()) {
    all.push_back(mistake);
  }
  return all;
}

bool is_one_of(const mx::array& array, const std::set<std::string>& names) {
  return names.contains(array.primitive().name());
}

// Whether an array's numbers lie in order, or will.
bool in_order(const mx::array& array) {
  if (!array.has_primitive()) {
    return array.flags().row_contiguous;
  }
  if (is_one_of(array, {"ExpandDims", "Squeeze"})) {
    return in_order(array.inputs()[0]);
  }
  if (!is_one_of(array, {"Slice"})) {
    return array.size() <= 1 || !is_one_of(array, {"Broadcast", "Split", "Transpose"});
  }
  const mx::Shape steps = std::get<2>(static_cast<const mx::Slice&>(array.primitive()).state());
  bool ordered = in_order(array.inputs()[0]);
  int64_t stride = 1;
  int64_t whole = 1;
  for (int i = array.ndim() - 1; i >= 0; --i) {
    ordered &= array.shape(i) == 1 || steps[i] * whole == stride;
    stride *= array.shape(i);
    whole *= array.inputs()[0].shape(i);
  }
  return ordered;
}

// Whether a GPU computes nothing for an array that is not there yet.
bool is_view(const mx::array& array) {
  return is_one_of(array, {"Broadcast", "ExpandDims", "Slice", "Split", "Squeeze", "Transpose"}) ||
         (is_one_of(array, {"Contiguous", "Flatten", "Reshape", "Unflatten"}) &&
          in_order(array.inputs()[0]));
}

// The buffer that an array lies in, and as how many numbers MLX counts it. A weight that takes no
// memory, because all of its numbers are one, counts as a weight does that has them.
using Use = std::pair<uint64_t, uint64_t>;

Use use_of(mx::array array) {
  while (array.has_primitive() && is_view(array)) {
    array = mx::array(array.inputs()[0]);
  }
  if (array.has_primitive()) {
    return {array.id(), array.size()};
  }
  return {reinterpret_cast<uint64_t>(array.buffer().ptr()),
          array.data_size() == 0 ? 0 : array.size()};
}

using Operation = std::tuple<std::string, std::vector<Use>, std::set<size_t>>;

Operation describe(const mx::array& array) {
  Operation operation{array.primitive().name(), {}, {}};
  auto& [name, uses, scattered] = operation;
  if (is_view(array)) {
    return operation;
  }
  for (size_t i = 0; i < array.inputs().size(); ++i) {
    uses.push_back(use_of(array.inputs()[i]));
    if (!in_order(array.inputs()[i])) {
      scattered.insert(i);
    }
  }
  for (const mx::array& output : array.outputs()) {
    uses.emplace_back(output.id(), output.size());
  }
  return operation;
}

// What has to be computed for these arrays, inputs first.
std::vector<Operation> operations_behind(const std::vector<mx::array>& ends) {
  std::vector<Operation> operations;
  std::set<uint64_t> entered;
  std::set<uint64_t> done;  // first outputs: what MLX compiles is one primitive in all its uses
  std::vector<mx::array> open(ends.rbegin(), ends.rend());
  while (!open.empty()) {
    const mx::array array = open.back();
    if (!array.has_primitive() || done.contains(array.outputs().front().id())) {
      open.pop_back();
    } else if (entered.insert(array.id()).second) {
      open.insert(open.end(), array.inputs().rbegin(), array.inputs().rend());
    } else {
      open.pop_back();
      done.insert(array.outputs().front().id());
      operations.push_back(describe(array));
    }
  }
  return operations;
}

std::map<std::string, uint64_t> counts() {
  const Counts& c = Recorder::instance().counts;
  return {{"operations", c.operations}, {"commands", c.commands},
          {"encoders", c.encoders},     {"command_buffers", c.command_buffers},
          {"barriers", c.barriers},     {"waits", c.waits}};
}

std::map<std::string, uint64_t> residency() {
  fake::Machine& machine = fake::Machine::current();
  const std::lock_guard lock(machine.mutex);
  uint64_t buffers = 0;
  for (const auto& [address, buffer] : machine.addresses) {
    buffers += buffer->in_residency_sets > 0 ? 1 : 0;
  }
  return {{"sets", machine.alive()["MTLResidencySet"]},
          {"buffers", buffers},
          {"requests", machine.residency_requests}};
}

}  // namespace
}  // namespace quire::graph

NB_MODULE(_standin, m) {
  using quire::graph::Recorder;
  nb::module_::import_("mlx.core");
  m.def("start", &quire::graph::start, "seed"_a, "lacks"_a = std::set<std::string>{});
  m.def("seed", [](uint64_t seed) { Recorder::instance().seed(seed); }, "seed"_a);
  m.def("observed", &quire::graph::observed, "result"_a, "reads"_a);
  m.def("zeros_of_nothing", &quire::graph::zeros_of_nothing, "shape"_a, "dtype"_a);
  m.def("hand_over", [] { Recorder::instance().hand_over(); });
  m.def("settle", [] { Recorder::instance().settle(); });
  m.def("take_mistakes", &quire::graph::take_mistakes);
  m.def("counts", &quire::graph::counts);
  m.def("residency", &quire::graph::residency);
  m.def("operations_behind", &quire::graph::operations_behind, "arrays"_a);
  m.def("calls", [](const std::string& operation) {
    return Recorder::instance().calls(operation); }, "operation"_a);
  m.def("stall_mappings", [] { quire::fake::Machine::current().stall_mappings(); });
  m.def("allow_maps_beside_commands", [](bool allowed) {
    quire::fake::Machine::current().allow_maps_beside_commands(allowed);
  }, "allowed"_a);
  m.def("fail_next_commands", [](const std::string& words) {
    quire::fake::Machine::current().fail_next_commands(words);
  }, "words"_a);
  m.def("plant", [](const std::string& operation, const std::string& call,
                    const std::set<size_t>& which, const std::string& how) {
    Recorder::instance().plant({operation, call, which, how});
  }, "operation"_a, "call"_a = "", "which"_a = std::set<size_t>{}, "how"_a = "");
}
