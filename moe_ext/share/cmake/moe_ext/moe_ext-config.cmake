# find_package(moe_ext REQUIRED) defines the target moe_ext::moe_ext, with torch as its dependency.
# A program that links it needs no other settings. CMAKE_PREFIX_PATH is the output of
# `python -m moe_ext.info --cmake-prefix`, or the folders of an installed moe_ext and of LibTorch.
include("${CMAKE_CURRENT_LIST_DIR}/moe_ext-torch.cmake")
if(MOE_EXT_TORCH_ERROR)
  set(moe_ext_FOUND FALSE)
  set(moe_ext_NOT_FOUND_MESSAGE "${MOE_EXT_TORCH_ERROR}")
  return()
endif()

get_filename_component(moe_ext_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
# Each release of torch has a library of its own.
set(moe_ext_library "${moe_ext_root}/lib/torch${MOE_EXT_TORCH_RELEASE}/libmoe_ext.so")
if(NOT EXISTS "${moe_ext_library}")
  set(moe_ext_FOUND FALSE)
  file(GLOB moe_ext_releases RELATIVE "${moe_ext_root}/lib" "${moe_ext_root}/lib/torch*")
  list(TRANSFORM moe_ext_releases REPLACE "^torch" "")
  list(SORT moe_ext_releases COMPARE NATURAL)
  list(JOIN moe_ext_releases ", " moe_ext_releases)
  if(moe_ext_releases)
    set(moe_ext_NOT_FOUND_MESSAGE "moe_ext was built for torch ${moe_ext_releases}, but \
${MOE_EXT_TORCH_ROOT} has torch ${MOE_EXT_TORCH_VERSION}: build moe_ext again, or put another torch \
first in CMAKE_PREFIX_PATH")
  else()
    set(moe_ext_NOT_FOUND_MESSAGE "${moe_ext_library} has not been built")
  endif()
  return()
endif()

if(NOT TARGET moe_ext::moe_ext)
  add_library(moe_ext::kernels SHARED IMPORTED)
  set_target_properties(moe_ext::kernels PROPERTIES
    IMPORTED_LOCATION "${moe_ext_root}/lib/libmoe_ext_kernels.so"
    IMPORTED_SONAME libmoe_ext_kernels.so)
  add_library(moe_ext::library SHARED IMPORTED)
  set_target_properties(moe_ext::library PROPERTIES
    IMPORTED_LOCATION "${moe_ext_library}"
    IMPORTED_SONAME libmoe_ext.so)
  # Linked even if a program calls none of its functions, for example to load an exported model:
  # loading the library registers the operators.
  add_library(moe_ext::moe_ext INTERFACE IMPORTED)
  set_target_properties(moe_ext::moe_ext PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${moe_ext_root}/include"
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"
    # torch first: its CUDA libraries know where CUDA is, and libmoe_ext.so needs CUDA's runtime.
    INTERFACE_LINK_LIBRARIES "moe_ext::torch;moe_ext::library;moe_ext::kernels")
endif()
