#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/checked.h"
#include "metal/arguments.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "ops/metal/layer.h"
#include "ops/metal/ops.h"

namespace quire::ops {
namespace {

class Swiglu final : public mx::Primitive {
 public:
  explicit Swiglu(metal::Kernel kernel)
      : Primitive(mx::default_stream(mx::default_device())), kernel_(std::move(kernel)) {}

  const char* name() const override { return "swiglu"; }

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Encoder encoder(stream(), name());
    const mx::array gate = encoder.contiguous(in[0]);
    const mx::array up = encoder.contiguous(in[1]);
    out[0].set_data(mx::allocator::malloc(out[0].nbytes()));
    const auto elements = narrowed<uint32_t>("elements", out[0].size());
    encoder.kernel(kernel_);
    encoder.input(gate, 0);
    encoder.input(up, 1);
    encoder.output(out[0], 2);
    encoder.bytes(elements, 3);
    encoder.run_threads(
        MTL::Size((elements + metal::kSwigluNumbers - 1) / metal::kSwigluNumbers, 1, 1));
  }
  // A CPU stream is refused by the encoder, in the words that say why.
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    eval_gpu(in, out);
  }

 private:
  const metal::Kernel kernel_;
};

}  // namespace

mx::array swiglu(const mx::array& gate, const mx::array& up) {
  const metal::Number type = number_of("gate", gate.dtype());
  check_same_type("gate", gate, "up", up);
  if (gate.shape() != up.shape()) {
    throw std::invalid_argument("gate and up have different shapes");
  }
  constexpr int64_t kMostElements = int64_t{1} << 31;
  checked_between("elements of gate", static_cast<int64_t>(gate.size()), 1, kMostElements);
  return mx::array(
      gate.shape(), gate.dtype(), std::make_shared<Swiglu>(metal::swiglu_kernel(type)),
      {gate, up});
}

}  // namespace quire::ops
