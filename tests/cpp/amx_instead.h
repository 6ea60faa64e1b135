// Replaces AMX by the functions of the namespace amx_instead: the tile instructions, the cpuid leaf
// that shows them, and the system call that permits them. The headers that define these functions
// (emulated_amx.h, timed_amx.h) end with this one.
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
