// Tiles, the registers of a CPU's matrix units (AMX), and the instructions on them. Where there are none, or the
// compiler does not know them, only `may_use_matrix_units` is there.
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

constexpr int64_t kTileRows = 16;                       // rows of a tile, and columns of one of sums
constexpr int64_t kTileInputs = 32;                     // bfloat16 numbers of a row
constexpr int64_t kTileSize = kTileRows * kTileInputs;  // of a tile
constexpr int64_t kPair = 2;                            // numbers that one instruction multiplies and adds at once

// Asks the operating system for the registers, which a process has to do once.
inline bool may_use_matrix_units() {
#ifdef HAS_MATRIX_UNITS
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#ifdef HAS_MATRIX_UNITS

// The compiler's own intrinsics do not tell it what memory they read, so these are written as assembly.

// What the instruction that shapes tiles reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};

// Makes all tiles as large as can be. The registers belong to the thread, and other libraries shape them as they like:
// each piece of work begins with this and ends with `release_tiles`.
inline void shape_tiles() {
    const TileShapes shapes;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int N>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(N));
}

// Reads 16 rows of 64 bytes that lie one after the other.
template <int N>
inline void load_tile(const void* tile) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(tile), "r"(int64_t(64)), "i"(N) : "memory");
}

// Reads 16 rows of 64 bytes, which begin `stride` words of 4 bytes apart.
template <int N>
inline void load_tile(const void* tile, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(tile), "r"(stride * 4), "i"(N) : "memory");
}

// Asks the first-level cache for the 16 lines that a tile is when its rows lie one after the other. `load_tile` of a
// line that is not there holds up the tiles after it, too, and most of all where another thread shares the core: tiles
// are asked for two steps before they are read, between products, one tile at a time.
inline void ask_for_tile(const void* tile) {
    for (int64_t line = 0; line < kTileRows; ++line) _mm_prefetch((const char*)tile + line * kLineBytes, _MM_HINT_T0);
}

// Writes 16 rows of 16 floats, which begin `stride` floats apart.
template <int N>
inline void store_tile(float* sums, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(stride * int64_t(sizeof *sums)), "i"(N) : "memory");
}

// Adds to 16 x 16 sums the products of tile X's rows with what tile W holds of 16 columns: pairs of bfloat16.
template <int kSums, int X, int W>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(X), "i"(W));
}

#endif

}  // namespace
