# Kernels of kernels/metal for the CPU. Set these, include this file, and link MSL_OBJECTS:
#
#   ROOT         of the checkout
#   PYTHON       any 3.11, without packages
#   MSL_OUT      a folder for what is made
#   MSL_KERNELS  names of kernels (`print_kernels` prints all)
#   MSL_OPTIONS  for the compiler; with -fsanitize=thread the kernels alone are instrumented
#   MSL_EDITS    changes of the texts, for translate.py

MSL := $(ROOT)/tests/metal/msl
MSL_CXX ?= clang++-19
MSL_MACHINE := $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mfma -mf16c)
MSL_FLAGS = -std=c++20 -O2 $(MSL_MACHINE) -fPIC -fno-strict-aliasing -fvisibility=hidden \
  -Wall -Wextra -MMD -MP -I$(MSL) $(MSL_OPTIONS)
MSL_KERNEL_FLAGS = $(MSL_FLAGS) -D__METAL_VERSION__=310 -isystem $(MSL)/include
MSL_RACES := $(findstring -fsanitize=thread,$(MSL_OPTIONS))

MSL_FILES := append blocks combine decode delta experts gather products project route step
MSL_OF_append := $(filter append_%,$(MSL_KERNELS))
MSL_OF_combine := $(filter decode_combine_%,$(MSL_KERNELS))
MSL_OF_decode := $(filter decode_split_%,$(MSL_KERNELS))
MSL_OF_delta := $(filter delta_%,$(MSL_KERNELS))
MSL_OF_experts := $(filter expert_gates_% expert_downs_% mix_%,$(MSL_KERNELS))
MSL_OF_products := $(filter products_% gated_product_%,$(MSL_KERNELS))
MSL_OF_route := $(filter route_%,$(MSL_KERNELS))
MSL_OF_project := $(filter project_append_%,$(MSL_KERNELS))
MSL_OF_gather := $(filter gather_%,$(MSL_KERNELS))
MSL_OF_blocks := $(filter zero_blocks copy_blocks,$(MSL_KERNELS))
MSL_OF_step := $(filter mark_step,$(MSL_KERNELS))
MSL_USED := $(foreach file,$(MSL_FILES),$(if $(MSL_OF_$(file)),$(file)))
MSL_OBJECTS := $(MSL_USED:%=$(MSL_OUT)/kernels_%.o) \
  $(patsubst %,$(MSL_OUT)/msl_%.o,fiber threadgroup launch)
MSL_TEXTS := $(wildcard $(ROOT)/metal_ext/kernels/metal/*)

$(MSL_OUT)/kernel_texts.cpp: $(MSL_TEXTS) | $(MSL_OUT)
	cmake -DOUTPUT=$(abspath $@) -P $(ROOT)/metal_ext/kernels/metal/embed.cmake
	touch $@

$(MSL_OUT)/print_kernels: $(MSL)/print_kernels.cpp $(MSL_OUT)/kernel_texts.cpp \
    $(ROOT)/metal_ext/csrc/core/metal/kernel_text.cpp \
    $(ROOT)/metal_ext/csrc/core/metal/kernel_text.h
	$(MSL_CXX) -std=c++20 -O1 -Wall -Wextra -I$(ROOT)/metal_ext/csrc -I$(ROOT)/metal_ext/kernels \
	  -o $@ $(filter %.cpp,$^)

$(MSL_OUT)/kernels_%.cpp: $(MSL_OUT)/print_kernels $(MSL)/translate.py
	$< $(MSL_OF_$*) > $(@:.cpp=.metal)
	$(PYTHON) $(MSL)/translate.py $(@:.cpp=.metal) $(MSL_EDITS) > $@

$(MSL_OUT)/kernels_%.o: $(MSL_OUT)/kernels_%.cpp $(wildcard $(MSL)/include/* $(MSL)/include/msl/*)
	$(MSL_CXX) $(MSL_KERNEL_FLAGS) -c -o $@ $<

# The scheduler itself must not be instrumented: its own order is no order of the device.
$(MSL_OUT)/msl_%.o: $(MSL)/%.cpp | $(MSL_OUT)
	$(MSL_CXX) $(filter-out $(MSL_RACES),$(MSL_FLAGS)) $(if $(MSL_RACES),-DMSL_RACES) -c -o $@ $<

$(MSL_OUT):
	mkdir -p $@

.SECONDARY:
.DELETE_ON_ERROR:
-include $(wildcard $(MSL_OUT)/*.d)
