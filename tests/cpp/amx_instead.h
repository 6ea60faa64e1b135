// Calls the functions of the namespace amx_instead in place of AMX: the tile instructions, the
// cpuid leaf that shows them, and the permission of the operating system. emulated_amx.h and
// timed_amx.h define these functions, and end with this header.
#pragma once

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(configuration) ((void)(configuration))
#define _tile_release() ((void)0)
#define _tile_zero(tile) amx_instead::zero<tile>()
#define _tile_loadd(tile, from, stride) amx_instead::load<tile>(from, stride)
#define _tile_stored(tile, to, stride) amx_instead::store<tile>(to, stride)
#define _tile_dpbf16ps(to, a, b) amx_instead::multiply<to, a, b>()
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(d) = ~0u, 1)
#define syscall(...) 0
