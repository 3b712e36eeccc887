// libmlx has metal-cpp's selectors; a second definition must not be exported beside them.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Metal/Metal.hpp>
