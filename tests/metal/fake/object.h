#pragma once

#include <objc/objc.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>

// An Objective-C of our own, as much of it as metal-cpp uses: objects with a reference count,
// classes with methods by selector, and objc_msgSend. Methods are ordinary member functions:
//
//   const Definition heap = define("MTLHeap").method<&Heap::size>("size");
//
// An object whose last reference went gives its resources up, but stays as a corpse until the
// machine goes, so that whoever still uses it is caught and told what it was.
namespace quire::fake {

using Method = void (*)();

class Object;

struct Class {
  static constexpr uint64_t kMagic = 0x51ca55;
  const uint64_t magic = kMagic;
  std::string name;
  Object* (*make)() = nullptr;  // for +alloc
  std::unordered_map<SEL, Method> methods;
  std::unordered_map<SEL, Method> class_methods;
};

class Object {
 public:
  explicit Object(const char* class_name);
  virtual ~Object() = default;
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  const Class& isa() const { return *isa_; }
  const std::string& name() const { return isa_->name; }
  bool alive() const { return references_.load(std::memory_order_relaxed) > 0; }

  Object* retain();
  void release();
  Object* autorelease();
  uint64_t retain_count() const { return references_.load(); }
  Object* init() { return this; }
  bool responds(SEL selector) const;
  void* no_signature(SEL) { return nullptr; }

 protected:
  // The last reference is gone: gives up what the object has of the system's.
  virtual void dealloc() {}

 private:
  friend Method method_of(const void* object, SEL selector);

  static constexpr uint64_t kMagic = 0x0b1ec7;
  const uint64_t magic_ = kMagic;
  const Class* const isa_;
  std::atomic<uint64_t> references_{1};
};

// --- how a class is said -----------------------------------------------------------------------

// Made on first use, so that the order in which files are initialised does not matter.
Class& class_named(const std::string& name);

template <class T, class R, class... A>
struct Signature {
  template <R (T::*function)(A...)>
  static R call(Object* self, SEL, A... arguments) {
    return (static_cast<T*>(self)->*function)(arguments...);
  }
  template <R (T::*function)(A...) const>
  static R call_const(Object* self, SEL, A... arguments) {
    return (static_cast<const T*>(self)->*function)(arguments...);
  }
};

class Definition {
 public:
  explicit Definition(Class& described) : class_(&described) {}

  template <auto function>
  Definition& method(const char* selector) {
    class_->methods[sel_of(selector)] = thunk<function>(function);
    return *this;
  }
  // A free function without `self`.
  template <auto function>
  Definition& class_method(const char* selector) {
    class_->class_methods[sel_of(selector)] = static_thunk(function);
    return *this;
  }
  template <class T>
  Definition& makes() {
    class_->make = []() -> Object* { return new T(); };
    return *this;
  }

 private:
  static SEL sel_of(const char* selector);

  template <auto function, class T, class R, class... A>
  static Method thunk(R (T::*)(A...)) {
    return reinterpret_cast<Method>(&Signature<T, R, A...>::template call<function>);
  }
  template <auto function, class T, class R, class... A>
  static Method thunk(R (T::*)(A...) const) {
    return reinterpret_cast<Method>(&Signature<T, R, A...>::template call_const<function>);
  }
  template <class R, class... A>
  static Method static_thunk(R (*function)(const Class*, SEL, A...)) {
    return reinterpret_cast<Method>(function);
  }

  Class* class_;
};

inline Definition define(const char* name) { return Definition(class_named(name)); }

// What objc_msgSend jumps to. Reports a message to what is no object any more, or to an object that
// does not answer it; both are answered with 0.
Method method_of(const void* object, SEL selector);

}  // namespace quire::fake
