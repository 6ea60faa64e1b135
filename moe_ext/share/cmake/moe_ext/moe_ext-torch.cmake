# Defines the target moe_ext::torch: the headers and libraries of a LibTorch.
#
# find_package(Torch) of a torch with CUDA needs a CUDA toolkit, TORCH_CUDA_ARCH_LIST and a recent
# CMake, even for a project without CUDA code. This file needs none of them. It finds torch in
# CMAKE_PREFIX_PATH or Torch_DIR: a LibTorch, or the folder that `torch.utils.cmake_prefix_path`
# names; else beside this installation.
#
# Sets MOE_EXT_TORCH_ROOT and, from torch's headers, MOE_EXT_TORCH_VERSION, such as 2.15.0.

# Three folders lie between a package of CMake and its root: share/cmake/Torch.
find_path(MOE_EXT_TORCH_ROOT include/torch/csrc/api/include/torch/torch.h
  HINTS "${Torch_DIR}/../../.."
  PATHS "${CMAKE_CURRENT_LIST_DIR}/../../../../torch"
  PATH_SUFFIXES ../.. .
  DOC "The folder of torch, with include and lib")
if(NOT MOE_EXT_TORCH_ROOT)
  message(FATAL_ERROR "moe_ext: found no torch; add LibTorch's folder, or the output of "
    "`python -c 'import torch; print(torch.utils.cmake_prefix_path)'`, to CMAKE_PREFIX_PATH")
endif()
get_filename_component(MOE_EXT_TORCH_ROOT "${MOE_EXT_TORCH_ROOT}" ABSOLUTE)

set(MOE_EXT_TORCH_VERSION "")
foreach(part MAJOR MINOR PATCH)
  file(GLOB moe_ext_headers "${MOE_EXT_TORCH_ROOT}/include/torch/headeronly/version.h"
    "${MOE_EXT_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")
  foreach(header IN LISTS moe_ext_headers)
    file(STRINGS "${header}" line REGEX "#define TORCH_VERSION_${part} [0-9]+")
    if(line MATCHES "([0-9]+)$")
      list(APPEND MOE_EXT_TORCH_VERSION "${CMAKE_MATCH_1}")
      break()
    endif()
  endforeach()
endforeach()
list(JOIN MOE_EXT_TORCH_VERSION "." MOE_EXT_TORCH_VERSION)

if(NOT TARGET moe_ext::torch)
  add_library(moe_ext::torch INTERFACE IMPORTED)
  set_target_properties(moe_ext::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES
      "${MOE_EXT_TORCH_ROOT}/include;${MOE_EXT_TORCH_ROOT}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    # torch's CUDA libraries find theirs, such as NCCL, at run time only.
    INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
  foreach(name c10 torch_cpu torch c10_cuda torch_cuda)
    set(file "${MOE_EXT_TORCH_ROOT}/lib/lib${name}.so")
    if(EXISTS "${file}")
      add_library(moe_ext::lib${name} SHARED IMPORTED)
      set_target_properties(moe_ext::lib${name} PROPERTIES IMPORTED_LOCATION "${file}")
      set_property(TARGET moe_ext::torch APPEND PROPERTY INTERFACE_LINK_LIBRARIES moe_ext::lib${name})
    endif()
  endforeach()
endif()
