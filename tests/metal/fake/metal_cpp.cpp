// metal-cpp's selectors and classes. On a Mac MLX's library has them; here nobody else does.
#define NS_PRIVATE_IMPLEMENTATION
#define CA_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <Foundation/Foundation.hpp>
#include <QuartzCore/QuartzCore.hpp>
#include <Metal/Metal.hpp>

#include <cstdlib>

// metal-cpp wraps handlers in blocks, which need a runtime of their own; nothing of ours has any.
extern "C" {
void* _NSConcreteStackBlock[32];
void _Block_object_assign(void*, const void*, int) { std::abort(); }
void _Block_object_dispose(const void*, int) {}
}
