// AMX: tile registers and the instructions on them.
//
// Instruction sets: AMX-TILE, AMX-BF16, AVX512-BF16 and AVX512-BW, on Linux. If the compiler may use all of them,
// HAS_MATRIX_UNITS is defined. Otherwise `may_use_matrix_units` returns false, and callers use vectors.
#pragma once

#include <cstdint>

#include "graftlm/sizes.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) &&              \
    defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_MATRIX_UNITS 1
#endif

namespace {

constexpr int64_t kTileRows = 16;                       // rows of a tile; also columns of a tile of sums
constexpr int64_t kTileInputs = 32;                     // bfloat16 numbers in a row
constexpr int64_t kTileSize = kTileRows * kTileInputs;  // numbers in a tile
constexpr int64_t kPair = 2;                            // numbers that one instruction multiplies and adds

// Requests the tile registers from the operating system, once per process. Returns whether this process may use them.
inline bool may_use_matrix_units() {
#ifdef HAS_MATRIX_UNITS
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arguments of arch_prctl
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#ifdef HAS_MATRIX_UNITS

// The functions below are assembly, because the compiler's intrinsics do not declare which memory they read.

// The operand of ldtilecfg.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};

// Sets all tiles to their full size. The configuration belongs to the thread, and other libraries may change it.
// Therefore each piece of work starts with this function and ends with `release_tiles`.
inline void shape_tiles() {
    const TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int N>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

// Reads 16 consecutive rows of 64 bytes.
template <int N>
inline void load_tile(const void* tile) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(tile), "r"(int64_t(64)), "i"(N) : "memory");
}

// Reads 16 rows of 64 bytes whose starts are `stride` 4-byte words apart.
template <int N>
inline void load_tile(const void* tile, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(tile), "r"(stride * 4), "i"(N) : "memory");
}

// Prefetches a tile of 16 consecutive lines to the first-level cache. A `load_tile` that misses the cache also delays
// the tiles after it, especially if another thread shares the core. Therefore callers prefetch a tile two steps before
// they load it, with one prefetch between two products.
inline void prefetch_tile(const void* tile) {
    for (int64_t line = 0; line < kTileRows; ++line) _mm_prefetch((const char*)tile + line * kLineBytes, _MM_HINT_T0);
}

// Writes 16 rows of 16 floats whose starts are `stride` floats apart.
template <int N>
inline void store_tile(float* sums, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(stride * int64_t(sizeof *sums)), "i"(N) : "memory");
}

// sums += x w for tiles of 16 x 16 sums, 16 rows of x and 16 columns of W, as pairs of bfloat16.
template <int kSums, int X, int W>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(X), "i"(W));
}

#endif

}  // namespace
