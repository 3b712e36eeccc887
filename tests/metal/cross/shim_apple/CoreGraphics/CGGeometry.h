// What metal-cpp takes from here: a size in points.
#pragma once

typedef double CGFloat;

typedef struct CGSize {
  CGFloat width;
  CGFloat height;
} CGSize;
