// The version of moe_ext. The Python package and the CMake package read it here.
#pragma once

#define MOE_EXT_VERSION "0.1.0"
