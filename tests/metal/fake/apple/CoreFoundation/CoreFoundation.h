#pragma once

typedef double CFTimeInterval;
typedef const void* CFTypeRef;
