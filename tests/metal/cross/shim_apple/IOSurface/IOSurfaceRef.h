// What metal-cpp takes from here: the name of a handle.
#pragma once

typedef struct __IOSurface* IOSurfaceRef;
