// The version of moe_ext. setup.py and CMakeLists.txt read it here.
#pragma once

#define MOE_EXT_VERSION "0.1.0"
