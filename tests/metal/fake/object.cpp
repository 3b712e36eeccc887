#include "object.h"

#include <objc/message.h>
#include <objc/runtime.h>

#include <cstring>
#include <map>
#include <mutex>

#include "machine.h"

namespace quire::fake {
namespace {

uint64_t nothing() { return 0; }

Object* allocate(const Class* described, SEL) {
  if (described->make == nullptr) {
    report("+[" + described->name + " alloc] is not modelled");
    return nullptr;
  }
  return described->make();
}

// Selectors, classes and what stands in them are made before main() and never go.
struct Names {
  std::mutex mutex;
  std::map<std::string, SEL> selectors;
  std::map<std::string, Class*> classes;
};

Names& names() {
  static auto* const all = new Names;
  return *all;
}

// What every object answers.
const std::unordered_map<SEL, Method>& common_methods() {
  static const auto* const methods = [] {
    define("NSObject")
        .method<&Object::retain>("retain")
        .method<&Object::release>("release")
        .method<&Object::autorelease>("autorelease")
        .method<&Object::retain_count>("retainCount")
        .method<&Object::init>("init")
        .method<&Object::responds>("respondsToSelector:")
        .method<&Object::no_signature>("methodSignatureForSelector:");
    return &class_named("NSObject").methods;
  }();
  return *methods;
}

const Method* find(const std::unordered_map<SEL, Method>& methods, SEL selector) {
  const auto found = methods.find(selector);
  return found == methods.end() ? nullptr : &found->second;
}

Method class_method_of(const Class& described, SEL selector) {
  static const SEL alloc = sel_registerName("alloc");
  if (selector == alloc) {
    return reinterpret_cast<Method>(&allocate);
  }
  if (const Method* method = find(described.class_methods, selector)) {
    return *method;
  }
  report("unrecognized selector +[" + described.name + " " + sel_getName(selector) + "]");
  return reinterpret_cast<Method>(&nothing);
}

}  // namespace

Class& class_named(const std::string& name) {
  const std::lock_guard lock(names().mutex);
  Class*& described = names().classes[name];
  if (described == nullptr) {
    described = new Class;
    described->name = name;
  }
  return *described;
}

SEL Definition::sel_of(const char* selector) { return sel_registerName(selector); }

Object::Object(const char* class_name) : isa_(&class_named(class_name)) {
  Machine::current().born(this);
}

Object* Object::retain() {
  references_.fetch_add(1);
  return this;
}

void Object::release() {
  if (references_.fetch_sub(1) == 1) {
    dealloc();
    Machine::current().died(this);
  }
}

bool Object::responds(SEL selector) const {
  if (Machine::current().lacks(name(), sel_getName(selector))) {
    return false;
  }
  return find(isa_->methods, selector) != nullptr || find(common_methods(), selector) != nullptr;
}

Method method_of(const void* object, SEL selector) {
  if (object == nullptr) {
    return reinterpret_cast<Method>(&nothing);
  }
  // Classes and objects both begin so that they can be told apart.
  const auto* const described = static_cast<const Class*>(object);
  if (described->magic == Class::kMagic) {
    return class_method_of(*described, selector);
  }
  const auto* const instance = static_cast<const Object*>(object);
  if (instance->magic_ != Object::kMagic) {
    report(std::string(sel_getName(selector)) + " was sent to what is no object");
    return reinterpret_cast<Method>(&nothing);
  }
  if (!instance->alive()) {
    report(std::string(sel_getName(selector)) + " was sent to a released " + instance->name());
    return reinterpret_cast<Method>(&nothing);
  }
  if (!Machine::current().lacks(instance->name(), sel_getName(selector))) {
    if (const Method* method = find(instance->isa().methods, selector)) {
      return *method;
    }
    if (const Method* method = find(common_methods(), selector)) {
      return *method;
    }
  }
  report("unrecognized selector -[" + instance->name() + " " + sel_getName(selector) + "]");
  return reinterpret_cast<Method>(&nothing);
}

}  // namespace quire::fake

// --- what metal-cpp calls ----------------------------------------------------------------------

using quire::fake::names;

extern "C" {

void* objc_lookUpClass(const char* name) { return &quire::fake::class_named(name); }

void* objc_getProtocol(const char*) { return nullptr; }

SEL sel_registerName(const char* name) {
  const std::lock_guard lock(names().mutex);
  SEL& selector = names().selectors[name];
  if (selector == nullptr) {
    selector = reinterpret_cast<SEL>(strdup(name));
  }
  return selector;
}

const char* sel_getName(SEL selector) { return reinterpret_cast<const char*>(selector); }

void* quire_fake_method_of(const void* object, SEL selector) {
  return reinterpret_cast<void*>(quire::fake::method_of(object, selector));
}

void objc_msgSend_stret(void) {
  quire::fake::report("a method that returns a structure by address is not modelled");
  std::abort();
}

}  // extern "C"

// Keeps all registers that may carry arguments, asks for the method, and jumps to it: arguments on
// the stack stay where they are, and the method returns to the caller. x86-64, System V.
asm(R"(
.text
.globl objc_msgSend
.globl objc_msgSend_fpret
.type objc_msgSend, @function
.type objc_msgSend_fpret, @function
objc_msgSend:
objc_msgSend_fpret:
  pushq %rbp
  movq %rsp, %rbp
  pushq %rdi
  pushq %rsi
  pushq %rdx
  pushq %rcx
  pushq %r8
  pushq %r9
  subq $128, %rsp
  movups %xmm0, (%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  movups %xmm4, 64(%rsp)
  movups %xmm5, 80(%rsp)
  movups %xmm6, 96(%rsp)
  movups %xmm7, 112(%rsp)
  call quire_fake_method_of@PLT
  movq %rax, %r11
  movups (%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  movups 64(%rsp), %xmm4
  movups 80(%rsp), %xmm5
  movups 96(%rsp), %xmm6
  movups 112(%rsp), %xmm7
  addq $128, %rsp
  popq %r9
  popq %r8
  popq %rcx
  popq %rdx
  popq %rsi
  popq %rdi
  popq %rbp
  jmp *%r11
)");
