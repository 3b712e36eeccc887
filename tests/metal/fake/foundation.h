#pragma once

#include <string>
#include <utility>
#include <vector>

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

class Array final : public Object {
 public:
  // The objects are its own from now on.
  explicit Array(std::vector<Object*> objects) : Object("NSArray"), objects_(std::move(objects)) {}
  uint64_t count() const { return objects_.size(); }
  Object* object(uint64_t index) const { return objects_.at(index); }

 protected:
  void dealloc() override;

 private:
  std::vector<Object*> objects_;
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
