// The version of moe_ext. setup.py, CMakeLists.txt and the CMake package read it here.
#pragma once

#define MOE_EXT_VERSION "0.1.0"
