#pragma once

#include <string>

#include "object.h"

namespace quire::fake {

class String final : public Object {
 public:
  explicit String(std::string text) : Object("NSString"), text_(std::move(text)) {}
  const char* utf8() const { return text_.c_str(); }
  const std::string& text() const { return text_; }

 private:
  const std::string text_;
};

class Error final : public Object {
 public:
  explicit Error(const std::string& text) : Object("NSError"), text_(text) {}
  Object* description() const { return (new String(text_))->autorelease(); }
  int64_t code() const { return 1; }

 private:
  const std::string text_;
};

}  // namespace quire::fake
