#pragma once

#include <objc/objc.h>

// Callers cast them to the type of the method.
extern "C" {
void objc_msgSend(void);
void objc_msgSend_fpret(void);
void objc_msgSend_stret(void);
}
