// Matrix units of x86 CPUs (AMX): tiles of 16 rows of 64 bytes, and their products of bfloat16 pairs, summed in float32.
//
// Where `matrix_units_permitted()`, a thread may use tiles while a `MatrixUnits(true)` of its own exists. Nothing of an
// earlier configuration is relied on: other libraries in the process have theirs.
//
// The instructions are written as assembly, because GCC 12's intrinsics do not tell the compiler what memory they read: it
// may drop or move the stores before them.

#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_MATRIX_UNITS 1
#endif

namespace graftlm {

#ifdef HAS_MATRIX_UNITS
constexpr int kUnitRows = 16;   // rows of a tile
constexpr int kUnitWords = 16;  // words of 32 bits in a row

// Linux gives tiles to processes that ask for them; a hypervisor or a filter of system calls may refuse.
inline bool matrix_units_permitted() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return permitted;
}

// While it exists, all eight tiles of its thread have their full size. Does nothing where they are not `wanted`.
class MatrixUnits {
public:
    explicit MatrixUnits(bool wanted) : wanted_(wanted) {
        if (!wanted_) return;
        Configuration all;
        for (int i = 0; i < 8; ++i) {
            all.row_bytes[i] = 4 * kUnitWords;
            all.rows[i] = kUnitRows;
        }
        asm volatile("ldtilecfg %0" ::"m"(all));
    }
    ~MatrixUnits() {
        if (wanted_) asm volatile("tilerelease");
    }
    MatrixUnits(const MatrixUnits&) = delete;
    MatrixUnits& operator=(const MatrixUnits&) = delete;

private:
    struct alignas(64) Configuration {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    const bool wanted_;
};

template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// `stride` is that of rows, in bytes.
template <int kTile>
inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
}

template <int kTile>
inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
}

// sum[r][c] += a[r][i] . b[i][c] over all words i, each a pair of bfloat16.
template <int kSum, int kA, int kB>
inline void tile_multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}
#else
inline bool matrix_units_permitted() { return false; }

class MatrixUnits {
public:
    explicit MatrixUnits(bool) {}
};
#endif

}  // namespace graftlm
