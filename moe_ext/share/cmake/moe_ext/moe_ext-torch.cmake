# Defines the target moe_ext::torch: the headers and libraries of a LibTorch.
#
# find_package(Torch) of a torch with CUDA needs a CUDA toolkit, TORCH_CUDA_ARCH_LIST and a recent
# CMake, even for a project without CUDA code. This file needs none of them. It finds torch in
# CMAKE_PREFIX_PATH or Torch_DIR: a LibTorch, or the folder that `torch.utils.cmake_prefix_path`
# names; else next to this installation.
#
# Sets MOE_EXT_TORCH_ROOT and, from torch's headers, MOE_EXT_TORCH_VERSION, such as 2.15.0, and
# MOE_EXT_TORCH_RELEASE, such as 2.15. Sets MOE_EXT_TORCH_ERROR if there is no torch.

# Not kept in the cache: a second run of CMake may have another CMAKE_PREFIX_PATH.
unset(moe_ext_torch_root CACHE)
# Three folders lie between a package of CMake and its root: share/cmake/Torch.
find_path(moe_ext_torch_root include/torch/csrc/api/include/torch/torch.h
  HINTS "${Torch_DIR}/../../.."
  PATHS "${CMAKE_CURRENT_LIST_DIR}/../../../../torch"
  PATH_SUFFIXES ../.. .)
set(MOE_EXT_TORCH_ERROR "")
if(NOT moe_ext_torch_root OR NOT EXISTS "${moe_ext_torch_root}/lib/libtorch_cpu.so")
  set(MOE_EXT_TORCH_ERROR "moe_ext: found no torch; add LibTorch's folder, or the output of \
`python -c 'import torch; print(torch.utils.cmake_prefix_path)'`, to CMAKE_PREFIX_PATH")
  return()
endif()
get_filename_component(MOE_EXT_TORCH_ROOT "${moe_ext_torch_root}" ABSOLUTE)
unset(moe_ext_torch_root CACHE)

set(MOE_EXT_TORCH_VERSION "")
file(GLOB moe_ext_headers "${MOE_EXT_TORCH_ROOT}/include/torch/headeronly/version.h"
  "${MOE_EXT_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")
foreach(moe_ext_part MAJOR MINOR PATCH)
  foreach(moe_ext_header IN LISTS moe_ext_headers)
    file(STRINGS "${moe_ext_header}" moe_ext_line
      REGEX "#define TORCH_VERSION_${moe_ext_part} [0-9]+")
    if(moe_ext_line MATCHES "([0-9]+)$")
      list(APPEND MOE_EXT_TORCH_VERSION "${CMAKE_MATCH_1}")
      break()
    endif()
  endforeach()
endforeach()
list(JOIN MOE_EXT_TORCH_VERSION "." MOE_EXT_TORCH_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" MOE_EXT_TORCH_RELEASE "${MOE_EXT_TORCH_VERSION}")

if(NOT TARGET moe_ext::torch)
  add_library(moe_ext::torch INTERFACE IMPORTED)
  set_target_properties(moe_ext::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${MOE_EXT_TORCH_ROOT}/include;${MOE_EXT_TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    # torch's CUDA libraries find theirs, such as NCCL, at run time only.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
  foreach(moe_ext_part c10 torch_cpu torch c10_cuda torch_cuda)
    set(moe_ext_file "${MOE_EXT_TORCH_ROOT}/lib/lib${moe_ext_part}.so")
    if(EXISTS "${moe_ext_file}")
      add_library(moe_ext::lib${moe_ext_part} SHARED IMPORTED)
      set_target_properties(moe_ext::lib${moe_ext_part} PROPERTIES
        IMPORTED_LOCATION "${moe_ext_file}")
      set_property(TARGET moe_ext::torch APPEND PROPERTY
        INTERFACE_LINK_LIBRARIES moe_ext::lib${moe_ext_part})
    endif()
  endforeach()
endif()
