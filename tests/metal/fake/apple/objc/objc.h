#pragma once

#include <cstddef>
#include <cstdint>

struct objc_class;
struct objc_selector;
struct objc_object {
  struct objc_class* isa;
};

typedef struct objc_object* id;
typedef struct objc_class* Class;
typedef struct objc_selector* SEL;
typedef struct objc_object Protocol;
typedef bool BOOL;
