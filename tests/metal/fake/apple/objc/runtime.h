#pragma once

#include <objc/objc.h>

// metal-cpp counts on Apple's header for it.
#include <cmath>

extern "C" {
void* objc_lookUpClass(const char* name);
void* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);
const char* sel_getName(SEL selector);
}
