#include "foundation.h"

#include <vector>

#include "machine.h"

namespace quire::fake {
namespace {

// Pools of a thread lie on top of each other: what is autoreleased goes into the topmost.
class Pool final : public Object {
 public:
  Pool() : Object("NSAutoreleasePool") { stack().push_back(this); }

  static std::vector<Pool*>& stack() {
    static thread_local std::vector<Pool*> pools;
    return pools;
  }
  void add(Object* object) { objects_.push_back(object); }

 protected:
  void dealloc() override {
    if (stack().empty() || stack().back() != this) {
      report("an autorelease pool was released on another thread, or before one above it");
      return;
    }
    stack().pop_back();
    for (Object* object : objects_) {
      object->release();
    }
    objects_.clear();
  }

 private:
  std::vector<Object*> objects_;
};

Object* string_with(const Class*, SEL, const char* text, uint64_t) {
  return (new String(text))->autorelease();
}

const auto defined = [] {
  define("NSAutoreleasePool").makes<Pool>().method<&Pool::release>("drain");
  define("NSArray").method<&Array::count>("count").method<&Array::object>("objectAtIndex:");
  define("NSString")
      .class_method<&string_with>("stringWithCString:encoding:")
      .method<&String::utf8>("UTF8String");
  define("NSError")
      .method<&Error::description>("localizedDescription")
      .method<&Error::code>("code");
  return true;
}();

}  // namespace

void Array::dealloc() {
  for (Object* object : objects_) {
    object->release();
  }
}

Object* Object::autorelease() {
  if (Pool::stack().empty()) {
    report("a " + name() + " was autoreleased where there is no pool: it leaks");
  } else {
    Pool::stack().back()->add(this);
  }
  return this;
}

}  // namespace quire::fake
