#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "mlx/device.h"
#include "mlx/primitives.h"
#include "ops/metal/rows.h"

namespace quire::ops {

// What the operations on Metal share: they encode commands, on a stream of the device.
class MetalPrimitive : public mx::Primitive {
 public:
  MetalPrimitive(const char* name, std::shared_ptr<MetalSubstrate> substrate)
      : Primitive(mx::default_stream(mx::default_device())),
        name_(name),
        substrate_(std::move(substrate)) {}

  const char* name() const override { return name_; }

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    Encoder encoder(stream(), *substrate_, name_);
    encode(encoder, in, out);
  }
  // A CPU stream is refused by the encoder, in the words that say why.
  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    eval_gpu(in, out);
  }

 protected:
  virtual void encode(
      Encoder& encoder, const std::vector<mx::array>& in, std::vector<mx::array>& out) = 0;

  metal::Substrate& memory() const { return *substrate_->memory; }

 private:
  const char* const name_;
  const std::shared_ptr<MetalSubstrate> substrate_;
};

// The same for the rows of a step.
class RowsPrimitive : public MetalPrimitive {
 public:
  RowsPrimitive(const char* name, std::shared_ptr<MetalRows> rows)
      : MetalPrimitive(name, rows->substrate()), rows_(std::move(rows)) {}

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    rows_->require_not_ended(name());
    MetalPrimitive::eval_gpu(in, out);
  }

 protected:
  MetalRows& rows() const { return *rows_; }

 private:
  const std::shared_ptr<MetalRows> rows_;
};

}  // namespace quire::ops
