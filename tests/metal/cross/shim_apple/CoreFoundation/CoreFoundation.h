// What metal-cpp takes from CoreFoundation: two types.
#pragma once

typedef double CFTimeInterval;
typedef const void* CFTypeRef;
